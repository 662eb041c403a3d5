"""What watches a run: its ledger, its lock, the policy for bad steps, and a graceful end on signals."""

from lmworks.watch.bad_steps import BadSteps
from lmworks.watch.ledger import Ledger, read_ledger
from lmworks.watch.lock import RunLock
from lmworks.watch.stop_signals import Stop, graceful_stop

__all__ = ["BadSteps", "Ledger", "RunLock", "Stop", "graceful_stop", "read_ledger"]
