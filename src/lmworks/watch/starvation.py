"""Data starvation: a run whose device waits for its data."""

from __future__ import annotations

from collections import deque

_WINDOW = 50


class Starvation:
    """Whether waiting for data took more than `share` of the time of the last `window` steps; told once, until it has been well again."""

    def __init__(self, share: float, window: int = _WINDOW) -> None:
        self.share = share
        self._steps: deque[tuple[float, float]] = deque(maxlen=window)
        self._told = False
        self.steps = 0

    def observe(self, waited: float, seconds: float) -> float | None:
        """Seconds that a step waited, of all that it took. Returns the share over the window if it is to be told now. `steps` counts
        the steps that ended a starved window."""
        self._steps.append((waited, seconds))
        if len(self._steps) < (self._steps.maxlen or 0):
            return None
        found = sum(waited for waited, _ in self._steps) / max(sum(seconds for _, seconds in self._steps), 1e-9)
        starved = found > self.share
        self.steps += starved
        if self._told or not starved:
            self._told = self._told and found > self.share / 2  # so that a share around the limit is not told again and again
            return None
        self._told = True
        return found


def advice(cached: bool) -> str:
    """What to change."""
    if cached:
        return "raise shards.cache.prefetch or shards.cache.max_bytes, or bring the shards nearer"
    return "put the shards on a faster disk, or give the process a core of its own for reading"
