"""Data that a run skips after a rollback: derived from its ledger, without state of its own (promise 1).

A rollback restores the weights of an earlier step, trains the steps up to `skip[0]` again, and continues with step `skip[1]`. Step
numbers do not change: the batch, the learning rate and the phase of a step are the same as without a rollback. The data order therefore
stays valid, the run ends at the planned step, and the skipped data is never trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmworks.watch.ledger import since_start_over

EVENT = "rollback"


@dataclass(frozen=True)
class Rollback:
    """`step` is the last step that was begun, `to_step` that of the checkpoint; steps [skip[0], skip[1]) are skipped from then on.
    `reason` is empty if a user requested it."""

    step: int
    to_step: int
    skip: tuple[int, int] | None = None
    reason: str = ""


def rollbacks(lines: Iterable[Mapping[str, Any]], stage: str) -> list[Rollback]:
    """The rollbacks of a stage since it last started over, from the lines of a ledger, oldest first."""
    found = []
    for line in since_start_over(lines, stage):
        if line["event"] == EVENT and line.get("stage", "pretrain") == stage:
            skip = line.get("skip")
            found.append(Rollback(line["step"], line["to_step"], skip and (int(skip[0]), int(skip[1])), line.get("reason") or ""))
    return found


def undone(step: int, known: int, history: Sequence[Rollback]) -> bool:
    """Whether a checkpoint of this step, saved after `known` rollbacks, was undone by a later rollback."""
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
        """In ascending order; they neither overlap nor touch."""
        return list(self._windows)

    def __contains__(self, step: int) -> bool:
        return self.next(step) != step

    def next(self, step: int) -> int:
        """The first step from `step` on that is trained."""
        return next((stop for start, stop in self._windows if start <= step < stop), step)

    def until(self, step: int, end: int) -> int:
        """Where the steps without interruption from `step` on end: at the next skipped step, or at `end`."""
        return min([start for start, _ in self._windows if start >= step] + [end])

    def before(self, step: int) -> list[tuple[int, int]]:
        """The windows, clipped to the steps before `step`."""
        return [(start, min(stop, step)) for start, stop in self._windows if start < step]
