"""A lower priority for the threads that hash and write checkpoints."""

from __future__ import annotations

import os
import sys
import threading

_NICE = 10  # a tenth of the weight of training where they compete; at 19 a busy machine would never finish a save


def yield_to_training() -> None:
    """Lower the priority of the calling thread and of those that it will start. Linux gives each thread its own."""
    if sys.platform == "linux":
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, max(_NICE, os.getpriority(os.PRIO_PROCESS, own)))
