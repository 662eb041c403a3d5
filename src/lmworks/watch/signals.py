"""Ctrl-C and SIGTERM: finish the step, save, leave; a second one leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """What the trainer asks between steps: has somebody asked to stop?"""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        """True from the first signal on."""
        return self.signal is not None

    def message(self, step: int, command: str) -> str:
        """The last line that a stopped run prints."""
        return f"stopped by {self.signal.name if self.signal else 'request'} and saved at step {step}; go on with: {command}"

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.signal = signal.Signals(number)
        # os.write, because a print inside a handler may meet the lock of the print that it interrupted.
        os.write(2, b"\nstopping after this step; once more to stop at once, without saving\n")


@contextmanager
def graceful_stop() -> Iterator[Stop]:
    """Within the block the first SIGINT or SIGTERM only sets the yielded `Stop`; a second one ends the process.

    Outside the main thread Python cannot catch signals: there the `Stop` is never set and the signals keep their meaning.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop._receive) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
