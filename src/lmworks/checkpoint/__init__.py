"""Checkpoints: saved atomically, verified before they are read, pruned by rules, and loadable on another mesh layout.

`save` explains a save step by step, with what is synced when and what happens when the disk is full. `checkpoints` is what training uses,
`listing` what readers use, which imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmworks.checkpoint.listing import list_checkpoints, newest_good, verify

if TYPE_CHECKING:
    from lmworks.checkpoint.checkpoints import Checkpoints, load

__all__ = ["Checkpoints", "list_checkpoints", "load", "newest_good", "verify"]


def __getattr__(name: str) -> Any:
    if name not in ("Checkpoints", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lmworks.checkpoint import checkpoints

    return getattr(checkpoints, name)
