"""Validation during training: bits per byte per domain, on the same text each time; the metric of the best checkpoint; early stopping.

Early stopping: a stage ends once its validation has not improved for a while.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lmworks.errors import UserError
from lmworks.optim.optimizer import Ema
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.train import EarlyStopping as EarlyStoppingOptions
from lmworks.recipe.schema.train import EarlyStopping as Options
from lmworks.shards.batch import Batch
from lmworks.shards.validation import TuningBatches
from lmworks.train.curriculum import Curriculum
from lmworks.ui import terminal
from lmworks.watch.ledger import Ledger


def validate(model: ParallelModel, held_out: Mapping[str, Iterable[Batch]]) -> dict[str, float]:
    """Metrics `validation/...` per domain and over all domains; the mode of the model (train or eval) is restored."""
    was_training = model.training
    model.eval()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    try:
        for domain, batches in held_out.items():
            sizes: list[tuple[int, int]] = []
            losses = model.summed_cross_entropies(_sized(batches, sizes))
            for measured in [(loss, *size) for loss, size in zip(losses, sizes, strict=True)]:
                for key in (domain, ""):
                    totals[key] = [sum(pair) for pair in zip(totals[key], measured, strict=True)]
    finally:
        model.train(was_training)
    values = {}
    for domain, (loss, tokens, size) in totals.items():
        prefix = f"validation/{domain}" if domain else "validation"
        values[f"{prefix}/loss"] = loss / max(tokens, 1)
        values[f"{prefix}/bits_per_byte"] = loss / math.log(2) / max(size, 1)
    return values


def _sized(batches: Iterable[Batch], sizes: list[tuple[int, int]]) -> Iterator[Batch]:
    """The batches, read one after another; the labels and the bytes of each are appended to `sizes`."""
    for batch in batches:
        sizes.append((batch.valid_tokens, batch.text_bytes))
        yield batch


def validate_conversations(model: ParallelModel, held_out: TuningBatches) -> dict[str, float]:
    """Mean loss over the assistant's tokens of held-out conversations."""
    was_training = model.training
    model.eval()
    try:
        batches = [held_out.batch(step) for step in range(held_out.steps)]
        total, tokens = sum(model.summed_cross_entropies(batches)), sum(batch.valid_tokens for batch in batches)
    finally:
        model.train(was_training)
    return {"validation/loss": total / max(tokens, 1)}


_SELECTS = ("validation/bits_per_byte", "validation/loss")


def selection_metric(values: Mapping[str, float]) -> str | None:
    """The default selection metric among the values of a validation; None if it has none."""
    return next((name for name in _SELECTS if name in values), None)


class EarlyStopper:
    """Counts validations without an improvement. Without `options` it only finds the lowest value, if `finds_best`. `state()` is stored in
    the checkpoint's meta, so that a resumed run stops at the same step."""

    def __init__(self, options: Options | None, finds_best: bool = False) -> None:
        self.options, self._finds_best = options, finds_best
        self.best: float | None = None
        self.best_step = self.waited = 0
        self.lowest: float | None = None  # regardless of `min_delta`
        self.lowest_step = 0

    @property
    def stops(self) -> bool:
        """Whether the stage ends now."""
        return self.options is not None and self.waited >= self.options.patience

    def metric(self, values: Mapping[str, float]) -> str | None:
        """The selection metric: that of the recipe, or the default among the values of a validation."""
        return self.options.metric if self.options and self.options.metric else selection_metric(values)

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Record the validation after `step` steps. Raises `UserError` if it does not contain the metric."""
        if self.options is None and not self._finds_best:
            return
        name = self.metric(values)
        if self.options is None and name is None:
            return
        if name is None or name not in values:
            known = ", ".join(sorted(one for one in values if one.startswith("validation/"))) or "nothing: no text is held out"
            raise UserError(f"early_stopping.metric: {name or 'a validation loss'} is not measured by this run, which measures {known}")
        value = values[name]
        if math.isfinite(value) and (self.lowest is None or value < self.lowest):
            self.lowest, self.lowest_step = value, step
        if self.options is None:
            return
        if math.isfinite(value) and (self.best is None or value < self.best - self.options.min_delta):
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1

    def state(self) -> dict[str, Any]:
        """For the checkpoint's meta."""
        names = ("best", "best_step", "waited", "lowest", "lowest_step")
        return {name: getattr(self, name) for name in names}

    def load(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step, self.waited = state["best"], int(state["best_step"]), int(state["waited"])
        self.lowest, self.lowest_step = state.get("lowest"), int(state.get("lowest_step", 0))  # missing in older checkpoints


class Validator:
    """Runs the validations of a stage. `measured` is the newest value of the selection metric, by the step after which it was measured."""

    def __init__(
        self, validate: Callable[[int], dict[str, float]], model: ParallelModel, curriculum: Curriculum, ledger: Ledger, *,
        stage: str, keep_best: bool, early_stopping: EarlyStoppingOptions | None, use_best: bool = False,
    ) -> None:  # fmt: skip
        """`use_best`: the stage ends with the best weights, whether or not it ends early."""
        self.measured: dict[int, float] = {}
        self.early_stopping = EarlyStopper(early_stopping, use_best)
        self._validate, self._model, self._curriculum, self._ledger = validate, model, curriculum, ledger
        self.metric: str | None = None  # the name of what is `measured`, once it was in this process
        self._stage, self._keep_best, self._use_best = stage, keep_best or use_best, use_best

    def run(self, step: int, ema: Ema | None) -> dict[str, float]:
        """Validate the model after `step` steps, with its averaged weights where there are any; the metrics. The same step again counts
        once for early stopping."""
        began = time.monotonic()
        with self._model.ema_weights(ema):
            values = self._validate(step)
        if step not in self.measured:
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
        terminal.console.print(f"{self._stage} ends with the weights of step {used:,}, whose held-out loss is the lowest", style="dim")

    def _report_early_stop(self, step: int) -> None:
        found, tokens, used = self.early_stopping.state(), self._curriculum.tokens_before(step), self.used_step(step)
        self._ledger.write("early_stop", stage=self._stage, step=step, tokens=tokens, used_step=used, **found)
        since = f"no improvement in {found['waited']} validations since step {found['best_step']:,}"
        text = f"{self._stage} ends early after step {step:,}: {since}; the weights of step {used:,} are used"
        terminal.console.print(text, style="yellow")
