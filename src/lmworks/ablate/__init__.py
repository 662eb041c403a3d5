"""Ablations: runs of one recipe that differ in some keys, repeated over seeds, with a verdict for every difference."""
