"""Threads of OpenMP that spin for a moment while they wait for the next product, instead of being woken up for it.

A step of decoding has hundreds of products of 50 to 500 microseconds, and to wake up a thread takes about as long. Elsewhere threads
sleep at once (`lmworks/__init__.py`), because one that spins takes the core of another program; `StepThreads` notices when that costs more
than it gains. An idle server does not spin.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
SPINNING = {"GOMP_SPINCOUNT": "20000"}
"""Pauses of 15 to 50 ns: longer than what one thread does alone between two products of a step."""


def spin() -> None:
    """Let the threads of this process spin, unless the environment says otherwise. libgomp reads it when torch is imported."""
    for name, value in SPINNING.items():
        os.environ.setdefault(name, value)


def apart(function: Callable[[], T]) -> T:
    """The result of a function that is called in a thread of its own, whose OpenMP threads end with it: libgomp lets threads spin only
    while it has no more of them than there are processors, and counts those of every thread that has ever computed."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # raised by `result`
            result.set_exception(error)

    thread = threading.Thread(target=run, name="lmworks-load", daemon=True)  # a daemon: an interruption does not wait for it
    thread.start()
    thread.join()
    return result.result()
