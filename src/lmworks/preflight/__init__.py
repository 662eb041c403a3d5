"""Preflight checks: verify the machines, the data and the layout before a run starts."""

from __future__ import annotations


