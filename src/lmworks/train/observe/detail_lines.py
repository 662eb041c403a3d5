"""When the statistics of layers are taken although `metrics.detail_every` does not ask for them: early, and after each event."""

from __future__ import annotations

import math

_FIRST = (1, 10, 100)  # steps
_LIMIT = 0.01  # of the time of all steps that this process trains, planned ones included
_ASSUMED = 0.5  # duration of the first statistics, in steps; measured: 0.1 to 0.4
_SPACING = 200  # after an event, the next ones wait until this many times the duration of the last has passed: 0.5% of the time at most


class DetailLines:
    """Steps 1, 10 and 100 of a stage, and the step after each event: a bad step, a spike, a rollback, a resume, a phase that begins.

    Only if all of them together take at most 1% of the time of the steps, those that are still planned included; a step that is planned
    counts as the fastest one so far. Events that cannot be afforded wait, early steps are left out. Since the duration of the first
    statistics is not known before, there are none in a process that trains fewer than 50 steps.

    All ranks are told of all events; the durations are those of the first rank, whose answer counts for all (`StepFlags.detail`).
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled, self._event = enabled, False
        self._trained, self._elapsed, self._fastest = 0, 0.0, math.inf  # steps, seconds of all and of one
        self._in_step = 0.0  # seconds of statistics in this step
        self._spent, self._last, self._next = 0.0, math.nan, 0.0  # seconds: of all statistics, of the last, and when events may follow

    def event(self) -> None:
        """Something has happened: the statistics of the next step are wanted."""
        self._event = True

    def due(self, step: int, steps: int) -> bool:
        """Whether the statistics of a step, counted from 1, of so many steps are to be taken."""
        wanted = step in _FIRST or (self._event and self._elapsed >= self._next)
        return self._enabled and wanted and self._affordable(steps - step + 1)

    def _affordable(self, left: int) -> bool:
        if not self._trained:
            return _LIMIT * left >= _ASSUMED
        next_one = _ASSUMED * self._elapsed / self._trained if math.isnan(self._last) else self._last
        return self._spent + next_one <= _LIMIT * (self._elapsed + left * self._fastest)

    def taken(self, seconds: float, asked: bool) -> None:
        """The statistics were taken, in so many seconds; on a GPU these include the rest of the step, which has to end first. asked: by
        `metrics.detail_every`, so that they cost the budget nothing."""
        self._event, self._in_step = False, self._in_step + seconds
        if not asked:
            self._last, self._next = seconds, self._elapsed + _SPACING * seconds
            self._spent += seconds

    def step(self, seconds: float) -> None:
        """A step has been trained, in so many seconds with the statistics of its layers."""
        seconds, self._in_step = max(seconds - self._in_step, 0.0), 0.0
        self._trained, self._elapsed = self._trained + 1, self._elapsed + seconds
        self._fastest = min(self._fastest, seconds)
