"""Checkpoints: saved atomically, verified before they are read, pruned by rules, and loadable on another mesh layout.

`save` explains a save step by step, with what is synced when and what happens when the disk is full. `checkpoints` is what training uses,
`listing` what readers use.
"""

from lmworks.checkpoint.checkpoints import Checkpoints, load
from lmworks.checkpoint.listing import list_checkpoints, newest_good, verify

__all__ = ["Checkpoints", "list_checkpoints", "load", "newest_good", "verify"]
