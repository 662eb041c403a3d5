"""Starts the ranks of a run with `torchrun`, here, on hosts or under Slurm, and keeps them going."""
