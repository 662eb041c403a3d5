"""When the statistics of layers are taken although `metrics.detail_every` does not ask for them: early, and after each event."""

from __future__ import annotations

import time

_FIRST = (1, 10, 100)  # steps
_SHARE = 200  # after an event, the next ones wait until this many times the duration of the last has passed: 0.5% of the time at most


class DetailLines:
    """Steps 1, 10 and 100 of a stage, and the step after each event: a bad step, a spike, a rollback, a resume, a phase that begins.

    All ranks are told of all events; the clock is that of the first rank, whose answer counts for all (`StepFlags.detail`).
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled, self._event = enabled, False
        self._next = 0.0

    def event(self) -> None:
        """Something has happened: the statistics of the next step are wanted."""
        self._event = True

    def due(self, step: int) -> bool:
        """Whether the statistics of a step, counted from 1, are to be taken."""
        return self._enabled and (step in _FIRST or (self._event and time.monotonic() >= self._next))

    def taken(self, seconds: float) -> None:
        """The statistics were taken, in so many seconds."""
        self._event, self._next = False, time.monotonic() + _SHARE * seconds
