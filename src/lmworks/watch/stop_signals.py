"""Ctrl-C, SIGTERM, SIGUSR1 (Slurm's warning before the time limit) and SIGHUP (the terminal was closed, or its connection lost): finish the
step, save, and exit; a second Ctrl-C exits at once.

In an interactive session the second one raises `KeyboardInterrupt` instead."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from lmworks.ui.terminal import leave_closed_terminal

_SAME_REQUEST = 1.0
"""Seconds within which a repeated signal counts as the same request: a terminal and a launcher both deliver Ctrl-C to a process."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to stop; SIGHUP does not if it is ignored, as under `nohup`."""
    hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *hangup)


_listeners: list[Callable[[str], None]] = []


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Within the block `listener` is called with the name of the signal that asks the run to stop, inside the handler of the signal."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Stop:
    """Whether a signal has asked the run to stop; the trainer checks it between steps."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._since = 0.0

    @property
    def requested(self) -> bool:
        """True from the first signal on."""
        return self.signal is not None

    @property
    def preempted(self) -> bool:
        """Whether the signal came from a scheduler or a closed terminal, and not from Ctrl-C: the run is to be requeued."""
        return self.signal not in (None, signal.SIGINT)

    def message(self, step: int, command: str) -> str:
        """The last line of a run that has stopped, and whose newest checkpoint is of `step`; 0 or -1 if nothing was saved."""
        by = self.signal.name if self.signal else "request"
        return f"stopped by {by}{f' and saved at step {step}' if step > 0 else '; nothing was saved'}; resume with: {command}"

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            # At a preemption Slurm and torchrun send several signals, SIGUSR1 and SIGTERM, which must not interrupt the save.
            if number == self.signal == signal.SIGINT and time.monotonic() - self._since > _SAME_REQUEST:
                if hasattr(sys, "ps1"):  # a notebook or a Python prompt, which outlives its run
                    raise KeyboardInterrupt
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.signal, self._since = signal.Signals(number), time.monotonic()
        for listener in _listeners:
            listener(self.signal.name)
        leave_closed_terminal()
        # os.write, because a print inside a handler could deadlock on the lock of the print that it interrupted.
        more = b"; press Ctrl-C again to stop at once, without saving" if number == signal.SIGINT else b""
        with suppress(OSError):  # nobody reads it
            os.write(2, b"\nstopping after this step" + more + b"\n")


@contextmanager
def graceful_stop() -> Iterator[Stop]:
    """Within the block the `stop_signals` only set the yielded `Stop`; a second SIGINT, a second or more after the first, ends
    the process, or raises `KeyboardInterrupt` in an interactive session.

    Outside the main thread Python cannot handle signals: there the `Stop` is never set, and the signals keep their default effect.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop._receive) for number in stop_signals()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
