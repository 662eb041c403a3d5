"""Slow ranks (stragglers): ranks that take longer for the same work.

In a synchronous step all ranks wait for the slowest one, so their step times are equal. Each rank's own time is compared instead: the
time between two collectives at step boundaries, and a fixed matrix multiplication.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

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
