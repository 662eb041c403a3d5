"""The difference between an arm and the baseline, with its standard error.

    difference  d = mean over seeds of (arm - baseline)
    variance    V = 2 sd^2 / S + V_items

`sd` is the noise floor (`noise`). For scores of N items, V_items is the part of the variance that comes from the choice of the items.
With D the table (seeds, items) of differences per item and R its residuals after the means of each seed and each item,

    V_items = max(0, var(item means of D) / N - sum R^2 / ((S - 1) (N - 1)) / (S N))

The second term is what the item means owe to the seeds, which the first term of V counts already. Where only the scores p and q of the two
arms were recorded, V_items = (p (1 - p) + q (1 - q)) / N: an upper bound, since an item that is hard for one arm is hard for the other.
The degrees of freedom of a sum are
Satterthwaite's (1946). Where one of the two arms was set aside for its larger spread, `sd` is estimated from these two alone (Welch 1947).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lmworks.ablate.statistics.noise import UNKNOWN, Noise
from lmworks.ablate.statistics.student import t_critical, t_two_sided

Items = np.ndarray | int | None
SHARED = 0.5  # the part of the variance over seeds that arms with the same data order are taken to share


@dataclass(frozen=True)
class Contrast:
    """Arm minus baseline over `seeds` seeds. `df` is 0 where the noise is not known; then `se` has no meaning. `arms` is the number of arms
    behind the noise floor."""

    difference: float
    se: float
    df: float
    seeds: int
    noise: Noise
    arms: int
    paired: bool
    items: float = 0.0  # variance of the difference from the choice of items
    own: bool = False  # judged by its own spread

    @property
    def p(self) -> float:
        """Two-sided p value of no difference; 1 where the noise is not known."""
        if not self.df or not self.se:
            return 1.0
        return t_two_sided(self.difference / self.se, self.df)


def own_df(arms: int, seeds: int, is_paired: bool) -> int:
    """Degrees of freedom of the noise floor of so many arms and seeds."""
    return ((arms - 1) if is_paired else arms) * (seeds - 1)


def pairing_pays(paired_df: float, unpaired_df: float, level: float) -> bool:
    """Whether the paired floor gives the shorter intervals, where arms share half of the variance over seeds.

    Pairing removes what a seed adds to all arms, and leaves fewer degrees of freedom: with two arms, three seeds and seven measures, the
    interval would be 1.6 times as wide. The unpaired floor contains what is shared, so its verdicts are valid too. Only counts decide:
    choosing by the measured spreads would favor the floor that is low by chance.
    """
    if not paired_df or not unpaired_df:
        return bool(paired_df)
    return t_critical(level, paired_df) * math.sqrt(1 - SHARED) <= t_critical(level, unpaired_df)


def contrast(
    arm: np.ndarray, baseline: np.ndarray, floor: Noise, arms: int, is_paired: bool, own: bool = False, items: Items = None
) -> Contrast:
    """The contrast of values over the same seeds (S,). `floor` is the noise floor of `arms` arms; `own` replaces it by that of these two.
    `items` is the table (S, N) of differences per item, or N where it was not recorded."""
    seeds = len(arm)
    difference = float(arm.mean() - baseline.mean())
    noise, arms = (_own_noise(arm, baseline, is_paired), 2) if own else (floor, arms)
    from_items, items_df = (0.0, 1.0) if items is None else _bound(arm, baseline, items) if isinstance(items, int) else _items(items)
    if not noise.df:
        return Contrast(difference, math.nan, 0, seeds, UNKNOWN, arms, is_paired, from_items)
    from_seeds = 2 * noise.sd**2 / seeds
    variance = from_seeds + from_items
    df = variance**2 / (from_seeds**2 / noise.df + from_items**2 / items_df) if variance else noise.df
    return Contrast(difference, math.sqrt(variance), df, seeds, noise, arms, is_paired, from_items, own)


def _own_noise(arm: np.ndarray, baseline: np.ndarray, is_paired: bool) -> Noise:
    """The noise of these two arms alone, per run."""
    seeds = len(arm)
    if seeds < 2:
        return UNKNOWN
    if is_paired:
        return Noise(float(np.std(arm - baseline, ddof=1)) / math.sqrt(2), seeds - 1)
    own, other = float(np.var(arm, ddof=1)), float(np.var(baseline, ddof=1))
    square = own**2 + other**2
    df = (own + other) ** 2 / (square / (seeds - 1)) if square else 2 * (seeds - 1)  # Welch
    return Noise(math.sqrt((own + other) / 2), df)


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
