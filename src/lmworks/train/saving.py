"""When and how the trainer saves: intervals, asynchronous saves, failed saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.errors import UserError
from lmworks.optim.placement import local
from lmworks.recipe.derivation.save_interval import save_interval
from lmworks.recipe.schema.recipe import Recipe
from lmworks.train.curriculum import PhaseSettings
from lmworks.train.faults.handler import FaultHandler
from lmworks.train.intervals import is_due


class Saver:
    """The saves of a stage. `saved` is the step of the newest checkpoint; -1 after an asynchronous save has failed."""

    def __init__(self, recipe: Recipe, checkpoints: Checkpoints, faults: FaultHandler, interval: int, ranks: int) -> None:
        self.saved = 0
        self._ranks = ranks
        self._pause: float | None = None
        self._checkpoints, self._faults, self._interval = checkpoints, faults, interval
        self._asynchronous, self._every_seconds = recipe.checkpoints.asynchronous, recipe.train.save_every_seconds
        self._in_progress = False  # an asynchronous save whose outcome is not known yet
        self._saved_at = self._began_at = time.monotonic()
        self._began = 0

    def start_timer(self, step: int) -> None:
        """Begin to count the time since the last save, and the time of the steps from `step` on."""
        self._saved_at = self._began_at = time.monotonic()
        self._began = step

    def step_seconds(self, step: int) -> float:
        """Seconds per step so far, with everything that is done between steps."""
        return (time.monotonic() - self._began_at) / max(1, step - self._began)

    def paused(self, seconds: float) -> None:
        """Note how long training stood still for a save."""
        self._pause = seconds

    @property
    def every_seconds(self) -> float:
        """`train.save_every_seconds`, or what follows from the last save and the expected failures (`save_interval`)."""
        return save_interval(self._pause, self._ranks) if self._every_seconds is None else float(self._every_seconds)

    def begin_phase(self, phase: PhaseSettings) -> None:
        self._faults.saves.every = phase.save_every or self._interval

    def is_due(self, step: int, phase: PhaseSettings | None) -> bool:
        """Whether a checkpoint is to be saved after `step` steps."""
        if phase is None or phase.save_every is None:
            return is_due(step, self._interval)
        return is_due(step - phase.first_step, phase.save_every)

    def is_due_by_time(self) -> bool:
        """Whether `every_seconds` have passed since the last save, by the clock of this rank."""
        return time.monotonic() - self._saved_at > self.every_seconds

    def retry_due(self, step: int) -> bool:
        """Whether a save that failed is to be tried again after `step` steps: not while the outcome of a later one is not known."""
        return not self._in_progress and self._faults.saves.retry_due(step)

    def save(
        self, step: int, state: Mapping[str, Any], meta: dict[str, Any], metric: float | None, wait: bool, before: Callable[[], None]
    ) -> UserError | None:
        """Save after `step` steps; returns why it failed, on all ranks alike. With `wait` the save has ended when this returns, and the
        caller decides about a failure; otherwise `FaultHandler` does. `metric` was measured on these weights, for the choice of the best
        checkpoint. `before` is run first, by all ranks; where it fails, the save has failed."""
        failure = None
        try:
            before()
            self._checkpoints.save(step, dict(state), meta, metric=metric, wait=wait)
        except UserError as error:
            failure = error
            if not wait:
                self._faults.save_failed(step, error)
        else:
            self.saved, self._in_progress = step, True
            if wait or not self._asynchronous:
                self.wait(step)
        self._saved_at = time.monotonic()
        return failure

    def wait(self, step: int) -> None:
        """Wait for the asynchronous save, if there is one, and report its outcome."""
        try:
            self._checkpoints.wait()
        except UserError as error:
            self.saved = -1
            self._faults.save_failed(step, error)
        else:
            if self._in_progress:
                self._faults.saves.succeeded()
        self._in_progress = False


def refuse_if_all_damaged(checkpoints: Checkpoints) -> None:
    """Raise `UserError` if checkpoints were set aside as damaged and no good one is left: training would silently start over."""
    directory = checkpoints.directory
    bad = [path.name for path in sorted(directory.glob("step-*.bad-*"), reverse=True)]
    if bad:
        reason = f" (the newest: {checkpoints.refused[0][1]})" if checkpoints.refused else ""
        raise UserError(
            f"no checkpoint in {directory} is good, and {len(bad)} were set aside as damaged{reason}: {', '.join(bad[:3])}; "
            "restore one from a copy, or delete that folder to train from the start"
        )


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements that this rank holds are numbers. The host waits once for each device that they are on."""
    flags: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        flags.setdefault(tensor.device, []).append(local(tensor).isfinite().all())
    return all(bool(torch.stack(of_device).all()) for of_device in flags.values())
