"""Ledger and lock of a run, policies for bad steps and rollbacks, heartbeats, and a graceful stop on signals."""

from lmworks.watch.ledger import Ledger, RunLock, read_ledger
from lmworks.watch.policy import BadSteps
from lmworks.watch.stop_signals import Stop, graceful_stop

__all__ = ["BadSteps", "Ledger", "RunLock", "Stop", "graceful_stop", "read_ledger"]
