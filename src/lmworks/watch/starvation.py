"""Data starvation: the device waits for batches."""

from __future__ import annotations

from collections import deque

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
