"""Ctrl-C while the command line is imported, in the first second of a command: one line and exit code 130, as later.

`lmworks.cli.main` imports this first. The process ends at once: nothing has begun, and code that imports may swallow an exception, or put
another one in its place.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from lmworks.ui.exit_codes import ExitCode

INTERRUPTED = "interrupted; finished work is kept, and the same command resumes it"


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


importing()
