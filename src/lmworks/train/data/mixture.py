"""Changes of the mixture of a run that has begun: asked for in the ledger, and taken up there before a batch depends on them.

`mixture_asked` is what somebody wants, `mixture_changed` what holds. The second names the step from which on it holds: the one asked for,
or the first whose batch no rank can have made. Only it counts when the run resumes, so a change is made once and for ever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks import jsonl
from lmworks.errors import UserError
from lmworks.files import explain_damage
from lmworks.parallel.mesh import Ranks
from lmworks.shards.batch import Batches
from lmworks.shards.order import Change
from lmworks.watch.ledger import Ledger, read_ledger
from lmworks.watch.lock import RunLock

LEDGER = "ledger.jsonl"
_ASKED, _TAKEN, _REFUSED = "mixture_asked", "mixture_changed", "mixture_refused"


@dataclass(frozen=True)
class Changes:
    """What the ledger says: changes that hold, and those asked for that no run has seen, by their number."""

    taken: list[Change]
    waiting: dict[int, Change]

    @property
    def all(self) -> list[Change]:
        """As they will be if the run takes up each at the step it was asked for."""
        return [*self.taken, *self.waiting.values()]


def read_changes(run_dir: Path) -> Changes:
    """All changes of a run's mixture, past and to come."""
    path = Path(run_dir) / LEDGER
    lines = read_ledger(path)
    with explain_damage(path):
        return _changes(lines)


def _changes(lines: Sequence[Mapping[str, Any]]) -> Changes:
    asked = [Change(line["step"], line["mixture"]) for line in lines if line["event"] == _ASKED]
    answered = {line["number"] for line in lines if line["event"] in (_TAKEN, _REFUSED)}
    taken = [Change(line["step"], line["mixture"]) for line in lines if line["event"] == _TAKEN]
    return Changes(taken, {number: change for number, change in enumerate(asked) if number not in answered})


def now(run_dir: Path) -> int:
    """The step that a run trains next, as far as its metrics tell."""
    lines = jsonl.read(Path(run_dir) / "metrics.jsonl")
    return max((int(line["step"]) for line in lines), default=0)


def check(run_dir: Path, step: int, weights: Sequence[str]) -> dict[str, float]:
    """`SOURCE=WEIGHT` of each as numbers; a UserError for what is none, does not sum to one, or comes too late."""
    if step < now(run_dir):
        raise UserError(f"step {step} was trained already; the run is at step {now(run_dir)}, choose that or a later one with --at")
    found: dict[str, float] = {}
    for text in weights:
        name, _, number = text.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            raise UserError(f"--set {text}: write SOURCE=WEIGHT, for example --set web=0.7") from None
    if abs(sum(found.values()) - 1) > 1e-6 or min(found.values()) <= 0:
        total = sum(found.values())
        raise UserError(f"the weights must be positive and sum to 1; these sum to {total:g}: name every source that is to be read")
    return found


def ask(run_dir: Path, change: Change) -> bool:
    """Write down a change for the run to take up; returns whether the run is at work now and will do so at once."""
    line = {"step": change.step, "mixture": dict(change.mixture)}
    try:
        lock = RunLock(run_dir)
    except UserError:  # at work: it owns the ledger, and a whole line at its end does not disturb it
        fd = os.open(Path(run_dir) / LEDGER, os.O_WRONLY | os.O_APPEND)
        try:
            jsonl.append(fd, {"event": _ASKED, **line})
            os.fsync(fd)
        finally:
            os.close(fd)
        return True
    with lock, Ledger(Path(run_dir) / LEDGER) as ledger:
        ledger.write(_ASKED, **line)
    return False


class MixtureUpdates:
    """Takes up what is asked for while a run is at work, at one step on all ranks: the first reads the ledger and tells the others."""

    def __init__(self, ledger: Ledger, batches: Batches, ranks: Ranks) -> None:
        self._ledger, self._batches, self._ranks, self._seen = ledger, batches, ranks, -1

    def has_pending(self) -> bool:
        """On the first rank, whether something waits to be taken up. While the ledger does not grow this is one call to the system."""
        if not self._ranks.is_first:
            return False
        size = self._ledger.path.stat().st_size
        waiting = size != self._seen and bool(_changes(self._ledger.read()).waiting)
        if not waiting:
            self._seen = size
        return waiting

    def apply_pending(self, first: int) -> None:
        """What was asked for holds from its step on, or from `first`, if that comes later. All ranks call this in the same step."""
        if self._ranks.is_first:
            taken = self._answer(first)
            self._ranks.broadcast([(change.step, dict(change.mixture)) for change in taken])
        else:
            taken = [Change(step, mixture) for step, mixture in self._ranks.receive_broadcast()]
        self._batches.change(taken)

    def _answer(self, first: int) -> list[Change]:
        """Every change that holds from now on; those that waited are answered in the ledger."""
        changes = _changes(self._ledger.read())
        taken = changes.taken
        for number, change in changes.waiting.items():
            change = Change(max(change.step, first), change.mixture)
            try:
                self._batches.orders([*taken, change])
            except UserError as reason:
                self._ledger.write(_REFUSED, number=number, reason=str(reason))
                continue
            self._ledger.write(_TAKEN, number=number, step=change.step, mixture=dict(change.mixture))
            taken = [*taken, change]
        return taken
