"""How many CPU threads a step takes: one or all of them, whichever is faster on this model and machine.

A step of a small model consists of hundreds of products of a few rows. Threads that sleep between them take longer to wake up than one
thread alone takes for such a product, and threads that spin take the cores of other programs, which then delay them in turn (LOG.md). So
both are tried, for each power of two of tokens, and tried again now and then. In a server the threads spin while they wait for the next
product (`lmworks.serve.spin`), for a millisecond at most.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")
_SAMPLES = 5  # durations that are kept of each number of threads
_SHARE = 50  # at most this part of the time is lost by trying the slower one


@dataclass
class _Size:
    """Durations of steps of one size, with each number of threads, and for how many seconds of steps the slower one is not tried."""

    seconds: list[deque[float]]
    rest: float | None = None

    def fastest(self) -> int:
        return min(range(len(self.seconds)), key=lambda index: statistics.median(self.seconds[index]))


class StepThreads:
    """Runs steps with the number of threads that has been the fastest; `threads` is the number of all."""

    def __init__(self, threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.choices = (threads, 1) if threads > 1 else (threads,)
        self._clock = clock
        self._sizes: dict[int, _Size] = {}  # by the power of two of tokens

    def run(self, tokens: int, step: Callable[[], T]) -> T:
        """The result of a step that processes so many tokens."""
        if len(self.choices) == 1:
            return step()
        size = self._sizes.setdefault(tokens.bit_length(), _Size([deque(maxlen=_SAMPLES) for _ in self.choices]))
        chosen = self._choose(size)
        torch.set_num_threads(self.choices[chosen])
        try:
            start = self._clock()
            result = step()
            seconds = self._clock() - start
        finally:
            torch.set_num_threads(self.choices[0])
        size.seconds[chosen].append(seconds)
        if all(size.seconds):
            fastest = size.fastest()
            if size.rest is None or chosen != fastest:
                lost = size.seconds[1 - fastest][-1] - statistics.median(size.seconds[fastest])
                size.rest = _SHARE * max(0.0, lost)
            else:
                size.rest -= seconds
        return result

    def _choose(self, size: _Size) -> int:
        untried = [index for index, seconds in enumerate(size.seconds) if not seconds]
        if untried:
            return untried[0]
        fastest = size.fastest()
        return fastest if size.rest is not None and size.rest > 0 else 1 - fastest
