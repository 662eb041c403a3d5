"""Starts the ranks of a run with `torchrun` (on this machine, on hosts, or under Slurm) and restarts them after failures."""
