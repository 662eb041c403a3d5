"""Monitors of a run: failed saves, slow ranks, data starvation.

- Failed saves: the run continues, retries before the next regular save, and ends after too many failures in a row.
- Slow ranks (stragglers): ranks that take longer for the same work. In a synchronous step all ranks wait for the slowest one, so their step
  times are equal. Each rank's own time is compared instead: the time between two collectives at step boundaries, and a fixed matrix
  multiplication.
- Data starvation: the device waits for batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch

from lmworks.errors import UserError


class FailedSaves:
    """Counts failed saves in a row. `retry_at` is the step after which the next retry is due, None after a successful save."""

    def __init__(self, max_failures: int, every: int) -> None:
        self.max_failures, self.every = max_failures, every
        self.in_a_row = 0
        self.retry_at: int | None = None

    def failed(self, step: int, error: UserError) -> int:
        """Record a failed save that was noticed after `step` steps; returns the steps until the next retry. They are halved each time,
        since every step adds to what a crash would lose. Raises the error after the last retry."""
        self.in_a_row += 1
        if self.in_a_row >= self.max_failures:
            raise UserError(f"{error} (it failed {self.in_a_row} times in a row: stability.max_failed_saves)")
        interval = max(1, self.every >> self.in_a_row)
        self.retry_at = step + interval
        return interval

    def succeeded(self) -> None:
        self.in_a_row, self.retry_at = 0, None

    def retry_due(self, step: int) -> bool:
        """Whether a retry is due after `step` steps."""
        return self.retry_at is not None and step >= self.retry_at


_SIZE = 256


class SlowRanks:
    """Finds ranks whose own time exceeds median + `threshold` * MAD in `patience` measurements in a row; each once until it recovers."""

    def __init__(self, threshold: float, patience: int = 3) -> None:
        self.threshold, self.patience = threshold, patience
        self._streaks: dict[int, int] = {}

    def observe(self, seconds: Sequence[float], floor: float) -> list[int]:
        """Record one measurement: the own times of all ranks, and the smallest excess that counts. Returns the ranks to report now."""
        if len(seconds) < 3:  # the slower of two ranks may be the normal one
            return []
        middle = median(seconds)
        spread = median(abs(value - middle) for value in seconds)
        limit = middle + max(self.threshold * spread, floor)
        slow = {rank for rank, value in enumerate(seconds) if value > limit}
        self._streaks = {rank: self._streaks.get(rank, 0) + 1 for rank in slow}
        return sorted(rank for rank, streak in self._streaks.items() if streak == self.patience)


def time_matmul(device: torch.device) -> float:
    """Seconds for a fixed computation (16 matrix multiplications of 256 x 256), the minimum of three runs."""
    square = torch.full((_SIZE, _SIZE), 1 / _SIZE, device=device)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        out = square
        for _ in range(16):
            out = out @ square
        out[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - began)
    return best


_WINDOW = 50


class Starvation:
    """Reports when waiting for batches took more than the fraction `share` of the time of the last `window` steps.

    It is reported once, and again only after the fraction has fallen below half of `share`.
    """

    def __init__(self, share: float, window: int = _WINDOW) -> None:
        self.share = share
        self._steps: deque[tuple[float, float]] = deque(maxlen=window)
        self._reported = False
        self.steps = 0

    def observe(self, waited: float, seconds: float) -> float | None:
        """Record the seconds that a step waited for its batch, and those of the whole step. Returns the fraction over the window if it is
        to be reported now. `steps` counts the steps that ended a starved window."""
        self._steps.append((waited, seconds))
        if len(self._steps) < (self._steps.maxlen or 0):
            return None
        found = sum(waited for waited, _ in self._steps) / max(sum(seconds for _, seconds in self._steps), 1e-9)
        starved = found > self.share
        self.steps += starved
        if self._reported or not starved:
            self._reported = self._reported and found > self.share / 2  # hysteresis: a fraction near the limit is not reported repeatedly
            return None
        self._reported = True
        return found


def advice(cached: bool) -> str:
    """What the user can change."""
    if cached:
        return "raise shards.cache.prefetch or shards.cache.max_bytes, or move the shards closer to the machine"
    return "put the shards on a faster disk, or reserve a CPU core for reading"
