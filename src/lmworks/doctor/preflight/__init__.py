"""Preflight checks: verify the machines, the data and the layout before a run starts."""
