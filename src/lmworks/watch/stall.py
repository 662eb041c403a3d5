"""Notices that training stands still, from the heartbeats of a rank; called by a process beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from lmworks.watch.heartbeat import Beat

PATIENCE = 1800.0
"""Seconds that are allowed to what has not been timed yet: a first step, which may compile, that of a phase, a first save or validation."""

_STEP = ("data", "update")  # what a step does; everything else is timed by its name
_WINDOW = 64


@dataclass(frozen=True)
class Stall:
    """The rank does not go on: it has been `doing` the same for `seconds`, and `limit` were expected at most."""

    step: int
    doing: str
    seconds: float
    limit: float

    def fields(self) -> Mapping[str, Any]:
        return {"step": self.step, "doing": self.doing, "seconds": round(self.seconds, 1), "limit": round(self.limit, 1)}


class StallMonitor:
    """Judges by the times of the same run: `factor` times the median time of a step, or times the longest save, validation and so on, and
    at least `minimum` seconds. A stall is reported once."""

    def __init__(self, factor: float, minimum: float) -> None:
        self.factor, self.minimum = factor, minimum
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._longest: dict[str, float] = {}
        self._last: Beat | None = None
        self._since = self._step_since = 0.0
        self._settled, self._unsettled, self._idle, self._reported = False, True, False, False

    def unsettle(self) -> None:
        """The step that begins next is not like the ones before: it is the first, of a phase, or after a roll-back."""
        self._unsettled = True

    def idle(self) -> None:
        """Training has ended; nothing is expected before the next heartbeat."""
        self._idle = True

    def observe(self, beat: Beat, now: float) -> Stall | None:
        """Record the last heartbeat at `now` (seconds of a clock that never jumps). Returns the stall to report, once."""
        last = self._last
        if last is None or (beat.step, beat.doing, beat.time) != (last.step, last.doing, last.time):
            if last is None or beat.step != last.step:
                if last is not None and beat.step > last.step and self._settled:
                    self._steps.append((now - self._step_since) / (beat.step - last.step))
                first = last is None or beat.step < last.step or self._unsettled
                self._step_since, self._settled, self._unsettled = now, not first, False
            if last is not None and last.doing not in _STEP:
                self._longest[last.doing] = max(self._longest.get(last.doing, 0.0), now - self._since)
            self._last, self._since, self._idle, self._reported = beat, now, False, False
            return None
        seconds, limit = now - self._since, self._limit(beat.doing)
        if self._idle or self._reported or seconds <= limit:
            return None
        self._reported = True
        return Stall(beat.step, beat.doing, seconds, limit)

    def _limit(self, doing: str) -> float:
        if doing in _STEP:
            known = median(self._steps) if self._settled and self._steps else None
        else:
            known = self._longest.get(doing)
        return PATIENCE if known is None else max(self.minimum, self.factor * known)
