"""Validation during training: the metric of the best checkpoint, and early stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from lmworks import progress
from lmworks.optim.ema import Ema
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.train import EarlyStopping as EarlyStoppingOptions
from lmworks.train.curriculum import Curriculum
from lmworks.train.early_stopping import EarlyStopping
from lmworks.watch.ledger import Ledger


class Validator:
    """Runs the validations of a stage. `measured` is the newest value of the selection metric, by the step after which it was measured."""

    def __init__(
        self, validate: Callable[[], dict[str, float]], model: ParallelModel, curriculum: Curriculum, ledger: Ledger, *,
        stage: str, keep_best: bool, early_stopping: EarlyStoppingOptions | None, use_best: bool = False,
    ) -> None:  # fmt: skip
        """`use_best`: the stage ends with the best weights, whether or not it ends early."""
        self.measured: dict[int, float] = {}
        self.early_stopping = EarlyStopping(early_stopping, use_best)
        self._validate, self._model, self._curriculum, self._ledger = validate, model, curriculum, ledger
        self.metric: str | None = None  # the name of what is `measured`, once it was in this process
        self._stage, self._keep_best, self._use_best = stage, keep_best or use_best, use_best

    def run(self, step: int, ema: Ema | None) -> dict[str, float]:
        """Validate the model after `step` steps, with its averaged weights where there are any; the metrics."""
        began = time.monotonic()
        with self._model.ema_weights(ema):
            values = self._validate()
        self.early_stopping.observe(step, values)
        name = self.metric = self.early_stopping.metric(values)
        self.measured = {step: values[name]} if name is not None and math.isfinite(values[name]) else {}
        if self._ended_early(step):
            self._report_early_stop(step)
        elif self._use_best and step >= self._curriculum.steps:
            self._report_best(step)
        return values | {"perf/validation_seconds": time.monotonic() - began}

    @property
    def stops(self) -> bool:
        """Whether early stopping ends the stage."""
        return self.early_stopping.stops

    def is_best(self, step: int) -> bool:
        """Whether the validation after `step` is the best so far and its checkpoint is to be kept."""
        return self._keep_best and self.early_stopping.lowest_step == step

    def used_step(self, step: int) -> int:
        """The step whose weights are those of the stage if it ends after `step`: the best step after an early stop, if it is kept, and
        always with `use_best`."""
        best = self.early_stopping.lowest_step
        return best if (self._use_best or self._ended_early(step)) and self._keep_best and best else step

    def meta(self) -> dict[str, Any]:
        """The validator's part of a checkpoint's meta."""
        return {"measured": self.measured, "early_stopping": self.early_stopping.state()}

    def load(self, meta: Mapping[str, Any]) -> None:
        """Continue from a checkpoint with this meta."""
        self.measured = {int(step): value for step, value in meta["measured"].items()}
        if "early_stopping" in meta:
            self.early_stopping.load(meta["early_stopping"])

    def _ended_early(self, step: int) -> bool:
        return self.stops and step < self._curriculum.steps

    def _report_best(self, step: int) -> None:
        used, lowest = self.used_step(step), self.early_stopping.lowest
        self._ledger.write("best_weights", stage=self._stage, step=step, used_step=used, lowest=lowest)
        progress.console.print(f"{self._stage} ends with the weights of step {used:,}, whose held-out loss is the lowest", style="dim")

    def _report_early_stop(self, step: int) -> None:
        found, tokens, used = self.early_stopping.state(), self._curriculum.tokens_before(step), self.used_step(step)
        self._ledger.write("early_stop", stage=self._stage, step=step, tokens=tokens, used_step=used, **found)
        since = f"no improvement in {found['waited']} validations since step {found['best_step']:,}"
        text = f"{self._stage} ends early after step {step:,}: {since}; the weights of step {used:,} are used"
        progress.console.print(text, style="yellow")
