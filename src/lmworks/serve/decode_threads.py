"""How many CPU threads a decode step takes: one or all of them, whichever is faster on this model and machine.

A decode step of a small model consists of hundreds of products of a few rows. Threads that have to be woken up for each of them can take
longer than one thread alone (LOG.md), and they take the cores from the server's event loop. In large models all threads are faster. So both
are tried, for each power of two of rows, and tried again now and then.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
_SAMPLES = 5  # durations that are kept of each number of threads
_AGAIN = 64  # steps after which the slower one is tried again


class DecodeThreads:
    """Runs decode steps with the number of threads that has been the fastest; `threads` is the number of all."""

    def __init__(self, threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.choices = (1, threads) if threads > 1 else (threads,)
        self._clock = clock
        self._seconds: dict[int, list[deque[float]]] = {}  # by the power of two of rows; one of each choice
        self._steps = 0

    def run(self, rows: int, step: Callable[[], T]) -> T:
        """The result of a step of so many rows."""
        if len(self.choices) == 1:
            return step()
        seconds = self._seconds.setdefault(rows.bit_length(), [deque(maxlen=_SAMPLES) for _ in self.choices])
        chosen = self._choose(seconds)
        torch.set_num_threads(self.choices[chosen])
        try:
            start = self._clock()
            result = step()
            seconds[chosen].append(self._clock() - start)
            return result
        finally:
            torch.set_num_threads(self.choices[-1])

    def _choose(self, seconds: list[deque[float]]) -> int:
        self._steps += 1
        fewest = min(range(len(seconds)), key=lambda index: len(seconds[index]))
        if len(seconds[fewest]) < _SAMPLES:
            return fewest
        ranked = sorted(range(len(seconds)), key=lambda index: statistics.median(seconds[index]))
        return ranked[-1] if self._steps % _AGAIN == 0 else ranked[0]
