"""The first second of a command, in which it is imported: Ctrl-C prints one line and ends with exit code 130, as later, and the garbage
collector rarely runs.

`lmworks.cli.main` imports this first. The process ends at once: nothing has begun, and code that imports may swallow an exception, or put
another one in its place.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

from lmworks.ui.exit_codes import ExitCode

INTERRUPTED = "interrupted; finished work is kept, and the same command resumes it"
COLLECT_AFTER = 10_000
"""How many more objects than are freed must be made before garbage is collected. With Python's 700 it is collected 700 times while torch is
imported, whose objects live until the end: a fifth of the time that a command takes to start."""


def _end(number: int, frame: Any) -> None:
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(ExitCode.INTERRUPTED)


def importing() -> None:
    """From here on, Ctrl-C ends the process. Not in another thread, and not where SIGINT is ignored or another program has its handler."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def imported() -> None:
    """From here on, Ctrl-C is a `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


gc.set_threshold(COLLECT_AFTER)
importing()
