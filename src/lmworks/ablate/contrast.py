"""The difference between an arm and the baseline, with its standard error, and the noise floor of a measure.

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

The noise floor of a measure is the standard deviation of one run's value over seeds, pooled over arms.

Values are arrays (arms, seeds). Two floors are estimated, each with its degrees of freedom:

    unpaired    residuals after the mean of each arm:               K (S - 1) degrees of freedom
    paired      residuals after the means of each arm and each seed: (K - 1) (S - 1)

The paired one holds where a seed fixes the data order in all arms: what a data order adds to all arms alike cancels in differences.

A floor takes all arms to vary alike. Verdicts rest on it only where an earlier ablation is named (`noise`); otherwise each difference is
judged by the spread of its two arms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmworks.ablate import welch
from lmworks.ablate.welch import f_upper, t_critical, t_power, t_two_sided

_LIKE = 0.001  # level of the F test of like spread


@dataclass(frozen=True)
class Noise:
    """Standard deviation of one run's value, estimated with `df` degrees of freedom. With 0 there is no estimate."""

    sd: float
    df: float

    def to_json(self) -> dict[str, float | None]:
        return {"sd": self.sd if self.df else None, "df": self.df}

    @classmethod
    def from_json(cls, value: Any) -> Noise:
        sd, df = value.get("sd"), value.get("df", 0)
        return cls(float(sd), float(df)) if df and sd is not None else UNKNOWN


UNKNOWN = Noise(math.nan, 0)


def paired(values: np.ndarray) -> Noise:
    """Residual standard deviation of arm + seed."""
    arms, seeds = values.shape
    df = (arms - 1) * (seeds - 1)
    if df < 1:
        return UNKNOWN
    residuals = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0, keepdims=True) + values.mean()
    return Noise(math.sqrt(float((residuals**2).sum()) / df), df)


def unpaired(values: np.ndarray) -> Noise:
    """Standard deviation over seeds, pooled over arms."""
    arms, seeds = values.shape
    df = arms * (seeds - 1)
    if df < 1:
        return UNKNOWN
    return Noise(math.sqrt(float(((values - values.mean(axis=1, keepdims=True)) ** 2).sum()) / df), df)


def pooled(noises: Iterable[Noise]) -> Noise:
    """One estimate of several, weighted by their degrees of freedom."""
    known = [one for one in noises if one.df]
    df = sum(one.df for one in known)
    return Noise(math.sqrt(sum(one.df * one.sd**2 for one in known) / df), df) if df else UNKNOWN


def with_earlier(here: Noise, earlier: Noise) -> Noise:
    """The floor of these runs and that of earlier ones; these alone where their spread is larger (F test at 0.1%)."""
    if (
        here.df
        and earlier.df
        and here.sd > earlier.sd
        and (not earlier.sd or f_upper(here.sd**2 / earlier.sd**2, here.df, earlier.df) < _LIKE)
    ):
        return here
    return pooled([here, earlier])


def own_df(arms: int, seeds: int, is_paired: bool) -> int:
    """Degrees of freedom of the noise floor of so many arms and seeds."""
    return ((arms - 1) if is_paired else arms) * (seeds - 1)


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
            return t_power(difference / self.se, self.df, self.nominal(level))
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
