"""Whether a score is above what guessing gets."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from lmworks.ablate.statistics.student import t_critical
from lmworks.evaluate.statistics import wilson


def is_above(scores: np.ndarray, chance: float, items: int | None, level: float) -> bool:
    """Whether the interval at `level` (two-sided) of the mean of an arm's scores (seeds,) lies above `chance`.

    With a number of items it is Wilson's for the mean over seeds, which all read the same items. Otherwise it is the t interval over seeds.
    """
    mean = float(scores.mean())
    if items:
        right = min(items, math.floor(mean * items + 1e-9))  # rounded down, against the rounding of a mean of whole numbers
        return wilson(right, items, NormalDist().inv_cdf(1 - level / 2))[0] > chance
    if len(scores) < 2:
        return False
    return mean - t_critical(level, len(scores) - 1) * float(scores.std(ddof=1)) / math.sqrt(len(scores)) > chance
