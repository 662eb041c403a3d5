"""Slow ranks: who takes longer for the same work.

In a synchronous step everybody waits for the slowest, so step times say nothing. What is compared is each rank's own time: what it does
between two collectives at the border of steps, and a fixed piece of arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

_SIZE = 256


class SlowRanks:
    """Names ranks whose own time lies beyond median + `threshold` * MAD in `patience` measurements in a row, once until they recover."""

    def __init__(self, threshold: float, patience: int = 3) -> None:
        self.threshold, self.patience = threshold, patience
        self._streaks: dict[int, int] = {}

    def observe(self, seconds: Sequence[float], floor: float) -> list[int]:
        """The own times of all ranks in one measurement, and the least excess that matters; the ranks that are to be named now."""
        if len(seconds) < 3:  # of two nobody can say who is the slow one
            return []
        middle = median(seconds)
        spread = median(abs(value - middle) for value in seconds)
        limit = middle + max(self.threshold * spread, floor)
        slow = {rank for rank, value in enumerate(seconds) if value > limit}
        self._streaks = {rank: self._streaks.get(rank, 0) + 1 for rank in slow}
        return sorted(rank for rank, streak in self._streaks.items() if streak == self.patience)


def time_matmul(device: torch.device) -> float:
    """Seconds that the device takes for a fixed piece of arithmetic (16 products of 256 x 256): the least of three."""
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
