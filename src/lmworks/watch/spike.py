"""Spikes: a loss or gradient norm far above those of the last steps, by median and MAD.

The limits of a step are computed from the steps before it. The step compares with them on the device and does not apply its update if
it is a spike; the host does not wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Any

from lmworks.recipe.schema.stability import Spike

_TINY = 1e-30


@dataclass(frozen=True)
class Limits:
    """The limits of loss and gradient norm; the update of a step is applied if both are below."""

    loss: float = math.inf
    grad_norm: float = math.inf


def upper_limit(values: Collection[float], threshold: float, floor: float) -> float:
    """median + max(threshold * MAD, floor). Neither outliers (up to half of the values) nor a slow trend move it much."""
    middle = median(values)
    return middle + max(threshold * median(abs(value - middle) for value in values), floor)


class Spikes:
    """Detects spikes step by step; a pure function of the steps since `since`, up to the length of the window.

    Spikes do not enter the window. Norms are compared by their logarithm, because their noise is multiplicative. With `options` None
    no step is a spike.
    """

    def __init__(self, options: Spike | None) -> None:
        self.options = options
        window = options.window if options else 1
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)
        self.since = -1
        self.in_a_row = 0

    def limits(self, step: int, since: int) -> Limits:
        """The limits of a step. `since`: the first step with the same settings (phase, warm-up and mixture considered); it may lie in the
        future. There are no limits until a quarter of the window is filled."""
        if since != self.since:
            self.forget(since)
        if self.options is None or step < since or len(self._losses) < self.options.window // 4:
            return Limits()
        threshold = self.options.threshold
        norm = upper_limit(self._norms, threshold, math.log(self.options.norm_factor))
        return Limits(upper_limit(self._losses, threshold, self.options.floor), math.exp(min(norm, 700.0)))

    def observe(self, step: int, loss: float, grad_norm: float, limits: Limits) -> bool:
        """Record a finite step and its limits; returns whether it was a spike."""
        if not (loss < limits.loss and grad_norm < limits.grad_norm):
            self.in_a_row += 1
            return True
        self.in_a_row = 0
        if step >= self.since:
            self._losses.append(loss)
            self._norms.append(math.log(max(grad_norm, _TINY)))
        return False

    def forget(self, since: int) -> None:
        """Start a new window at a step: another phase, or an accepted level."""
        self.since, self.in_a_row = since, 0
        self._losses.clear()
        self._norms.clear()

    def state(self) -> dict[str, Any]:
        """For the checkpoint's meta."""
        return {"since": self.since, "in_a_row": self.in_a_row, "losses": list(self._losses), "norms": list(self._norms)}

    def load(self, state: dict[str, Any]) -> None:
        self.forget(int(state["since"]))
        self.in_a_row = int(state["in_a_row"])
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])
