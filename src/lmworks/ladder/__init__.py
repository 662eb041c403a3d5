"""Scaling laws: fitted to a ladder of runs, and held to their predictions."""
