"""The downstream scaling law of a benchmark: score = chance + (ceiling - chance) * sigmoid(slope * (midpoint - loss)).

With the scaling law of the loss it predicts scores in two steps, as Gadre et al. (arXiv:2403.08540) predict the mean error from the loss on
held-out text, and Llama 3 (arXiv:2407.21783, section 3.2.1) and the OLMo ladder (arXiv:2412.04403) the accuracy by a sigmoid from the loss
of the right answers. Here it is a sigmoid of the held-out bits per byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}/[A-Za-z0-9][A-Za-z0-9_-]{0,99}$"  # SET/FORM, as in the metric eval/SET/FORM
MOST_ITEMS = 10**9


def sigmoid_score(
    loss: float | np.ndarray, chance: float, ceiling: float | np.ndarray, slope: float | np.ndarray, midpoint: float | np.ndarray
) -> np.ndarray:
    """The expected score at a loss. All arguments broadcast."""
    return np.asarray(chance + (ceiling - chance) * (1 + np.tanh(slope * (midpoint - loss) / 2)) / 2)  # tanh does not overflow


@dataclass(frozen=True)
class DownstreamLaw:
    """The score of benchmark `name` on `items` items as a function of the loss, fitted to `runs` runs.

    `p_value` is of the hypothesis that the scores do not rise as the loss falls. Without `signal` they are not shown to, and the curve says
    nothing about another loss. `samples` are bootstrap fits: ceiling, slope, midpoint, and the standard deviation of the expected scores of
    runs around the curve.
    """

    name: str
    chance: float
    ceiling: float
    slope: float
    midpoint: float
    items: int
    runs: int
    p_value: float
    signal: bool
    samples: tuple[tuple[float, float, float, float], ...] = ()

    def score(self, loss: float) -> float:
        return float(sigmoid_score(loss, self.chance, self.ceiling, self.slope, self.midpoint))

    def predict(self, losses: np.ndarray, items: int, level: float = 0.9) -> tuple[float, float, float] | None:
        """Predicted score and its prediction interval, for a run with a loss distributed as `losses`, on `items` items.

        The prediction is the median. The interval contains the uncertainty of the loss and of the curve, the spread of runs around it, and
        the binomial noise of the items. None without a signal.
        """
        if not self.signal or not self.samples:
            return None
        random = np.random.default_rng(0)
        ceiling, slope, midpoint, spread = np.asarray(self.samples)[random.integers(len(self.samples), size=losses.size)].T
        expected = sigmoid_score(losses.ravel(), self.chance, ceiling, slope, midpoint)
        of_runs = np.clip(expected + spread * random.standard_normal(losses.size), 0, 1)
        low, high = np.quantile(random.binomial(items, of_runs) / items, [(1 - level) / 2, (1 + level) / 2])
        return float(np.median(expected)), float(low), float(high)


_Share = Annotated[float, Field(ge=0, le=1)]
_Slope = Annotated[float, Field(ge=0, le=1e9)]
_Loss = Annotated[float, Field(ge=-1e9, le=1e9)]


class DownstreamLawFile(BaseModel):
    """A `DownstreamLaw` in a file that anybody may have written."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=NAME)
    chance: float = Field(ge=0, lt=1)
    ceiling: _Share
    slope: _Slope
    midpoint: _Loss
    items: int = Field(gt=0, le=MOST_ITEMS)
    runs: int = Field(gt=0, le=MOST_ITEMS)
    p_value: _Share
    signal: bool
    samples: tuple[tuple[_Share, _Slope, _Loss, _Share], ...] = ()
