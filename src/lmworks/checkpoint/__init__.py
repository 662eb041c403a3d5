"""Checkpoints that are whole or absent, verified before they are read, kept by rule, and loadable on another layout."""

from lmworks.checkpoint.checkpoints import Checkpoints, load
from lmworks.checkpoint.listing import list_checkpoints, newest_good, verify

__all__ = ["Checkpoints", "list_checkpoints", "load", "newest_good", "verify"]
