"""Checks of a node: GPUs, network, disks, memory, clock, processes. `lmworks health` prints them; the launcher runs it on hosts."""
