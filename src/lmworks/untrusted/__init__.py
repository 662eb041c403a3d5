"""Runs untrusted code and parses untrusted input in processes with limits."""
