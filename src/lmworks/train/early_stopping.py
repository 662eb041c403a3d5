"""Early stopping: a stage ends once its validation has not improved for a while."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.schema.train import EarlyStopping as Options

_SELECTS = ("validation/bits_per_byte", "validation/loss")


def selection_metric(values: Mapping[str, float]) -> str | None:
    """The default selection metric among the values of a validation; None if it has none."""
    return next((name for name in _SELECTS if name in values), None)


class EarlyStopping:
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
