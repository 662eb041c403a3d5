"""The difference between an arm and the baseline, with its standard error.

    difference  d = mean over seeds of (arm - baseline)
    variance    V = V_seeds + V_items

V_seeds is estimated from these two arms alone, so that arms need not vary alike. Paired, it is the variance over seeds of arm - baseline,
divided by S, and the test is the paired t test. Otherwise it is (var(arm) + var(baseline)) / S, and the test is Welch's (1947) at its exact
size (`welch`). Where a noise floor of all arms is assumed (`assumed`), V_seeds is 2 sd^2 / S: an assumption that these two vary over seeds
as the runs behind the floor. A pooled floor is never assumed unasked: with a baseline three times as noisy as eight arms it makes false
verdicts in 20% of ablations.

For scores of N items, V_items is the part of the variance that comes from the choice of the items.
With D the table (seeds, items) of differences per item and R its residuals after the means of each seed and each item,

    V_items = max(0, var(item means of D) / N - sum R^2 / ((S - 1) (N - 1)) / (S N))

The second term is what the item means owe to the seeds, which the first term of V counts already. Where only the scores p and q of the two
arms were recorded, V_items = (p (1 - p) + q (1 - q)) / N: an upper bound, since an item that is hard for one arm is hard for the other.
The degrees of freedom of a sum are Satterthwaite's (1946).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lmworks.ablate.statistics import welch
from lmworks.ablate.statistics.noise import UNKNOWN, Noise
from lmworks.ablate.statistics.student import power, t_critical, t_two_sided

Items = np.ndarray | int | None
SHARED = 0.5  # the part of the variance over seeds that arms with the same data order are taken to share


@dataclass(frozen=True)
class Contrast:
    """Arm minus baseline over `seeds` seeds. `parts` are the standard deviations per seed whose squares add up to the variance of the
    difference: one if paired or assumed, two after Welch. Each gets `df_per_seed` degrees of freedom more with every further seed. `df`
    is 0 where the noise is not known; then `se` has no meaning."""

    difference: float
    se: float
    df: float
    seeds: int
    parts: tuple[Noise, ...]
    paired: bool
    items: float = 0.0  # variance of the difference from the choice of items
    items_df: float = 1.0
    df_per_seed: float = 1.0

    @property
    def p(self) -> float:
        """Two-sided p value of no difference; 1 where the noise is not known."""
        if not self.df or not self.se:
            return 1.0
        p = t_two_sided(self.difference / self.se, self.df)
        return welch.size(p, self.parts[0].df) if self.is_welch else p

    @property
    def is_welch(self) -> bool:
        return len(self.parts) == 2

    @property
    def sd(self) -> float:
        """Standard deviation of one run over seeds, the root mean square of the two."""
        return math.sqrt(sum(part.sd**2 for part in self.parts) / 2) if self.df else math.nan

    def nominal(self, level: float) -> float:
        """The level of the t distribution at which the test has the size `level`."""
        return welch.nominal(level, self.parts[0].df) if self.is_welch else level

    def power(self, difference: float, level: float) -> float:
        """Probability that the test of size `level` finds a true difference of this size, for the spreads that were estimated."""
        if not self.is_welch or self.items:
            return power(difference / self.se, self.df, self.nominal(level))
        first, second = (part.sd**2 for part in self.parts)
        return welch.power(difference / self.se, int(self.parts[0].df), level, first / (first + second))

    def with_seeds(self, seeds: int) -> Contrast:
        """The same with another number of seeds, and the same spreads."""
        parts = tuple(Noise(part.sd, max(0.0, part.df + (seeds - self.seeds) * self.df_per_seed)) for part in self.parts)
        return _made(self.difference, seeds, parts, self.paired, (self.items, self.items_df), self.df_per_seed)


def pairing_pays(paired_df: float, unpaired_df: float, level: float, welch_df: float = 0) -> bool:
    """Whether pairs give the shorter intervals, where arms share half of the variance over seeds. `welch_df` is that of each of two arms
    where the unpaired test is Welch's.

    Pairing removes what a seed adds to all arms, and leaves fewer degrees of freedom. The unpaired spread contains what is shared, so its
    verdicts are valid too. Only counts decide: choosing by the measured spreads would favor the one that is low by chance.
    """
    if not paired_df or not unpaired_df:
        return bool(paired_df)
    unpaired_level = welch.nominal(level, welch_df) if welch_df else level
    return t_critical(level, paired_df) * math.sqrt(1 - SHARED) <= t_critical(unpaired_level, unpaired_df)


def contrast(
    arm: np.ndarray, baseline: np.ndarray, is_paired: bool, assumed: Noise = UNKNOWN, items: Items = None, df_per_seed: float = 1.0
) -> Contrast:
    """The contrast of values over the same seeds (S,). `assumed` is a noise floor that is taken to hold for both, which one more seed gives
    `df_per_seed` degrees of freedom. `items` is the table (S, N) of differences per item, or N where it was not recorded."""
    seeds = len(arm)
    difference = float(arm.mean() - baseline.mean())
    from_items = (0.0, 1.0) if items is None else _bound(arm, baseline, items) if isinstance(items, int) else _items(items)
    if assumed.df:
        return _made(difference, seeds, (Noise(math.sqrt(2) * assumed.sd, assumed.df),), is_paired, from_items, df_per_seed)
    if seeds < 2:
        return Contrast(difference, math.nan, 0, seeds, (), is_paired, *from_items)
    each = (arm - baseline,) if is_paired else (arm, baseline)
    return _made(difference, seeds, tuple(Noise(float(np.std(one, ddof=1)), seeds - 1) for one in each), is_paired, from_items)


def _made(
    difference: float, seeds: int, parts: tuple[Noise, ...], is_paired: bool, from_items: tuple[float, float], df_per_seed: float = 1.0
) -> Contrast:
    variances = [(part.sd**2 / seeds, part.df) for part in parts] + [from_items]
    variance = sum(value for value, _ in variances)
    squares = sum(value**2 / df for value, df in variances if df)
    df = variance**2 / squares if squares else sum(part.df for part in parts)
    return Contrast(difference, math.sqrt(variance), df, seeds, parts, is_paired, *from_items, df_per_seed)


def _bound(arm: np.ndarray, baseline: np.ndarray, count: int) -> tuple[float, float]:
    """The most that the choice of `count` items adds, and its degrees of freedom."""
    scores = np.clip([arm.mean(), baseline.mean()], 0, 1)
    return float((scores * (1 - scores)).sum()) / count, max(1.0, count - 1.0)


def _items(table: np.ndarray) -> tuple[float, float]:
    """Variance of the mean difference from the choice of items, and its degrees of freedom."""
    seeds, count = table.shape
    if count < 2:
        return 0.0, 1.0
    variance = float(table.mean(axis=0).var(ddof=1)) / count
    if seeds > 1:
        residuals = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
        variance -= float((residuals**2).sum()) / ((seeds - 1) * (count - 1)) / (seeds * count)
    return max(0.0, variance), count - 1.0
