"""Verdicts: which of all differences of an ablation are shown, at a family-wise error rate of 5% (Holm 1979).

The p values of all arms and measures are sorted. The r-th smallest of m is compared with 0.05 / (m - r + 1), up to the first that is not
below. A difference has an interval at the level that it was compared with, so the interval excludes 0 exactly where there is a verdict.

`is_above` tests whether a score is above the level of guessing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from lmworks.ablate import welch
from lmworks.ablate.contrast import Contrast
from lmworks.ablate.welch import root, t_critical
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


FAMILY_WISE = 0.05
POWER = 0.8
MOST_SEEDS = 1000

Outcome = Literal["higher", "lower", "no difference shown", "no verdict"]


@dataclass(frozen=True)
class Verdict:
    """What can be said of one difference. `level` is that of its test. Without a verdict, level and interval are not numbers."""

    outcome: Outcome
    contrast: Contrast
    level: float = math.nan
    adjusted_p: float = math.nan

    @property
    def low(self) -> float:
        return self.contrast.difference - self._half

    @property
    def high(self) -> float:
        return self.contrast.difference + self._half

    @property
    def _half(self) -> float:
        """Half of the interval at the level of the test."""
        return math.nan if math.isnan(self.level) else t_critical(self.contrast.nominal(self.level), self.contrast.df) * self.contrast.se

    @property
    def detectable(self) -> float:
        """The difference that would be found with 80% power."""
        if self.outcome == "no verdict":
            return math.nan
        return root(lambda shift: self.contrast.power(shift * self.contrast.se, self.level) - POWER) * self.contrast.se

    @property
    def seeds_needed(self) -> int | None:
        """The seeds with which a difference as large as the observed one would be found with 80% power; None if it was found, or if they
        are more than 1,000."""
        return seeds_needed(self.contrast, self.level) if self.outcome == "no difference shown" else None


def judge(contrasts: Sequence[Contrast]) -> list[Verdict]:
    """A verdict for each contrast of a family. Contrasts without a noise floor get no verdict and are no part of the family."""
    ranked = sorted((one for one in contrasts if _testable(one)), key=lambda one: one.p)
    m, adjusted, highest = len(ranked), list[float](), 0.0
    for rank, one in enumerate(ranked):
        highest = max(highest, min(1.0, (m - rank) * one.p))
        adjusted.append(highest)
    shown = sum(p <= FAMILY_WISE for p in adjusted)
    found: dict[int, Verdict] = {}
    for rank, (one, p) in enumerate(zip(ranked, adjusted, strict=True)):
        level = FAMILY_WISE / (m - min(rank, shown))
        outcome: Outcome = "no difference shown" if rank >= shown else "higher" if one.difference > 0 else "lower"
        found[id(one)] = Verdict(outcome, one, level, p)
    return [found.get(id(one), Verdict("no verdict", one)) for one in contrasts]


def _testable(one: Contrast) -> bool:
    return bool(one.df) and one.se > 0 and math.isfinite(one.difference)


def seeds_needed(one: Contrast, level: float) -> int | None:
    """The fewest seeds with which a difference of the observed size would be found with 80% power; None above 1,000."""

    def enough(seeds: int) -> bool:
        there = one.with_seeds(seeds)
        return bool(there.df) and there.power(abs(one.difference), level) >= POWER

    if not one.df or not one.sd or not enough(MOST_SEEDS):
        return None
    low, high = 1, MOST_SEEDS  # power rises with the seeds
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return max(high, one.seeds + 1)


def detectable_in_noise(seeds: int, tests: int) -> float | None:
    """The difference that `seeds` seeds find with 80% power where arms vary alike, in standard deviations; None with one seed."""
    if seeds < 2:
        return None
    level = FAMILY_WISE / max(1, tests)
    return root(lambda shift: welch.power(shift, seeds - 1, level, 0.5) - POWER) * math.sqrt(2 / seeds)
