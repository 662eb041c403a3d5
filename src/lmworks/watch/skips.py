"""Data that a run skips after a rollback: derived from its ledger, without state of its own (promise 1).

A rollback puts the weights back to those of an earlier step, trains the steps up to `skip[0]` again, and goes on with step `skip[1]`.
Steps keep their numbers: the batch of a step, its rate and its phase are what they would have been. So the order of the data and all
that is derived from it stay true, the run ends where it was planned to end, and what was left out is simply not trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EVENT = "rollback"


@dataclass(frozen=True)
class Rollback:
    """`step` is the last one that was begun, `to_step` that of the checkpoint; steps [skip[0], skip[1]) are left out from then on.
    `reason` is empty where a person asked for it."""

    step: int
    to_step: int
    skip: tuple[int, int] | None = None
    reason: str = ""


def rollbacks(lines: Iterable[Mapping[str, Any]], stage: str) -> list[Rollback]:
    """The rollbacks of a stage, as the lines of a ledger tell them, oldest first."""
    found = []
    for line in lines:
        if line["event"] == EVENT and line.get("stage", "pretrain") == stage:
            skip = line.get("skip")
            found.append(Rollback(line["step"], line["to_step"], skip and (int(skip[0]), int(skip[1])), line.get("reason") or ""))
    return found


def undone(step: int, known: int, history: Sequence[Rollback]) -> bool:
    """Whether a checkpoint of this step, saved when `known` rollbacks had happened, was taken back by a later one."""
    return any(step > one.to_step for one in history[known:])


class Skips:
    """The steps that are skipped, over all rollbacks so far."""

    def __init__(self, history: Iterable[Rollback]) -> None:
        self._windows: list[tuple[int, int]] = []
        for start, stop in sorted(one.skip for one in history if one.skip and one.skip[0] < one.skip[1]):
            if self._windows and start <= self._windows[-1][1]:
                self._windows[-1] = (self._windows[-1][0], max(stop, self._windows[-1][1]))
            else:
                self._windows.append((start, stop))

    @property
    def windows(self) -> list[tuple[int, int]]:
        """By rising step; they neither overlap nor touch."""
        return list(self._windows)

    def __contains__(self, step: int) -> bool:
        return self.next(step) != step

    def next(self, step: int) -> int:
        """The first step from `step` on that is trained."""
        return next((stop for start, stop in self._windows if start <= step < stop), step)

    def until(self, step: int, end: int) -> int:
        """Where the stretch of steps that begins with `step` ends: at the next one that is left out, or at `end`."""
        return min([start for start, _ in self._windows if start >= step] + [end])

    def before(self, step: int) -> list[tuple[int, int]]:
        """The windows as far as they lie before `step`."""
        return [(start, min(stop, step)) for start, stop in self._windows if start < step]
