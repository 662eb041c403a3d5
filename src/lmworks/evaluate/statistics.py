"""Statistics of evaluations: what a score of few items is worth, and whether two models differ.

Scores have Wilson intervals and are compared with the level of guessing. Differences of two models have intervals, tests, and a correction
for many tests. They are B minus A. Items that share a passage or a subject are one unit (a cluster): they are resampled together, because a
model that knows one of them tends to know the others (Miller 2024, arXiv:2411.00640).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Z_95 = 1.959963984540054  # two-sided 95% quantile of the normal distribution


def wilson(correct: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval for a proportion (JASA 22, 1927); sound near 0 and 1 and for small n, unlike p +- 2 se."""
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} of {n} is not a proportion")
    if n == 0:
        return 0.0, 1.0
    p = correct / n
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # at the ends the formula is exact but its rounding is not
    return (0.0 if correct == 0 else center - half), (1.0 if correct == n else center + half)


@dataclass(frozen=True)
class Score:
    """`correct` of `n` items, beside what guessing gets.

    `chance` is the mean over items of 1 / number of choices. `baseline` is what the best answer that ignores the
    question gets: chance, or more where one answer is commoner than the others (BoolQ says yes 62 times in 100).
    Free answers have a chance of 0 and only a baseline.
    """

    correct: int
    n: int
    chance: float
    baseline: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.n if self.n else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """95% confidence interval of the accuracy."""
        return wilson(self.correct, self.n)

    @property
    def verdict(self) -> str:
        """In words; `above` only if the whole interval lies above the baseline, `below` only if all of it lies under chance."""
        if self.n == 0:
            return "not measured"
        low, high = self.interval
        if self.chance == 0:
            return "above baseline" if low > self.baseline else "not above baseline"
        return "above chance" if low > self.baseline else "below chance" if high < self.chance else "at chance"

    def to_json(self) -> dict[str, float | int | str | list[float]]:
        return {"score": self.accuracy, "interval": list(self.interval), "n": self.n, "correct": self.correct,
                "chance": self.chance, "baseline": self.baseline, "verdict": self.verdict}


def pooled(scores: Sequence[Score]) -> Score:
    """The scores of several sets as one, each item counting once. The baseline always gives each set its best constant answer."""
    n = sum(score.n for score in scores)
    chance, baseline = (sum(getattr(score, level) * score.n for score in scores) / max(1, n) for level in ("chance", "baseline"))
    return Score(sum(score.correct for score in scores), n, chance, baseline)


RESAMPLES = 10_000
FLIPS = 20_000
LEVEL = 0.05
POWER = 0.8
FEWEST_CLUSTERS = 10
_CHUNK = 4_000_000  # numbers drawn at a time

Verdict = Literal["better", "worse", "no difference shown"]
HOW = {
    "interval": f"95%, paired bootstrap of items, or of clusters where items share a passage or a subject and there are at least "
    f"{FEWEST_CLUSTERS} of them; percentiles expanded for few units (Hesterberg 2015); each interval alone, not corrected for many tests",
    "p": "exact McNemar test; for clusters and for bits per byte its generalization, the sign-flip test of the units' differences",
    "unpaired": "Newcombe's hybrid score interval (1998, method 10) and Fisher's exact test: a published score has no items, so both "
    "models are treated as if they had answered different items, which is wide where they have answered the same ones",
    "correction": "Holm: the probability that any verdict of this comparison is false is at most 5%. It is valid for dependent tests, "
    "which these are (the scores share the models, and the pooled score contains the others), and never less powerful than Bonferroni's",
    "minimum detectable": f"the difference that would have been shown with {POWER:.0%} probability, at the level of the strictest test",
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """B minus A with a 95% interval. `p` is of the two-sided test of no difference, `adjusted_p` after Holm's correction.

    `n` counts items (or documents), `units` what was resampled; `detectable` is the minimum detectable effect.
    """

    a: float
    b: float
    low: float
    high: float
    p: float
    n: int
    units: int
    standard_error: float
    kind: Literal["paired", "paired, clustered", "unpaired"]
    lower_is_better: bool = False
    smallest_step: float = 0.0
    adjusted_p: float = math.nan
    detectable: float = math.nan

    @property
    def value(self) -> float:
        return self.b - self.a

    @property
    def verdict(self) -> Verdict:
        """Of B against A. It follows the corrected test, not the interval."""
        if not self.adjusted_p <= LEVEL:
            return "no difference shown"
        return "better" if (self.value > 0) != self.lower_is_better else "worse"

    def to_json(self) -> dict[str, Any]:
        return {"a": self.a, "b": self.b, "difference": self.value, "interval": [self.low, self.high], "p": self.p,
                "adjusted_p": self.adjusted_p, "verdict": self.verdict, "minimum_detectable": self.detectable, "n": self.n,
                "units": self.units, "kind": self.kind}  # fmt: skip


@dataclass(frozen=True)
class Pairs:
    """One score of two models over the same items. `units[i]` names the cluster of item i, or the item; scores of one `set` share
    units, so an item in two formulations is resampled once."""

    set: str
    units: Sequence[str]
    a: Sequence[float]
    b: Sequence[float]
    clustered: bool = False

    def __post_init__(self) -> None:
        if not len(self.units) == len(self.a) == len(self.b) > 0:
            raise ValueError("paired scores need the same items, at least one")


def compare_pairs(pairs: Sequence[Pairs], seed: int = 0) -> tuple[list[Difference], Difference | None]:
    """The difference of each right-or-wrong score, and of their mean (each score counts equally) where there are several."""
    rng = np.random.default_rng(seed)
    found: dict[int, Difference] = {}
    total = np.zeros(RESAMPLES)
    flips: list[tuple[str, str, float]] = []
    order = sorted(range(len(pairs)), key=lambda i: pairs[i].set)
    for one_set, group in groupby(order, key=lambda i: pairs[i].set):
        indices = list(group)
        resampled = _resample([pairs[i] for i in indices], rng)
        for i, means in zip(indices, resampled, strict=True):
            found[i] = _paired(pairs[i], means)
            total += means / len(pairs)
            weight = 1 / (len(pairs) * len(pairs[i].units))
            flips += [(one_set, unit, weight * (b - a)) for unit, a, b in zip(pairs[i].units, pairs[i].a, pairs[i].b, strict=True)]
    each = [found[i] for i in range(len(pairs))]
    if len(pairs) < 2:
        return each, None
    sums: dict[tuple[str, str], float] = {}
    for one_set, unit, value in flips:
        sums[one_set, unit] = sums.get((one_set, unit), 0.0) + value
    mean_a, mean_b = (math.fsum(getattr(one, side) for one in each) / len(each) for side in "ab")
    freedom = max(1, len(sums) - len({pair.set for pair in pairs}))
    low, high = _percentiles(total, freedom)
    kind: Any = "paired, clustered" if any(pair.clustered for pair in pairs) else "paired"
    p = sign_flip_p(np.array(list(sums.values())), rng)
    step = min(1 / (len(pairs) * one.n) for one in each)
    n, error = sum(one.n for one in each), float(total.std())
    return each, Difference(mean_a, mean_b, low, high, p, n, len(sums), error, kind, smallest_step=step)


def compare_bits(a_bits: Sequence[float], b_bits: Sequence[float], sizes: Sequence[int], seed: int = 0) -> Difference:
    """Bits per byte of the same documents: `a_bits` and `b_bits` of each, and its bytes. Documents are resampled whole, so long ones
    weigh more, as in the figure itself."""
    rng = np.random.default_rng(seed)
    a, b, size = (np.asarray(values, np.float64) for values in (a_bits, b_bits, sizes))
    rows = np.stack([b - a, size], 1)
    means = _ratios(rows, np.ones(len(rows), np.int64), rng)[:, 0]
    low, high = _percentiles(means, max(1, len(rows) - 1))
    p = sign_flip_p(b - a, rng)
    whole, n, error = size.sum(), len(rows), float(means.std())
    return Difference(a.sum() / whole, b.sum() / whole, low, high, p, n, n, error, "paired", lower_is_better=True)


def compare_counts(a_correct: int, a_n: int, b_correct: int, b_n: int) -> Difference:
    """Two proportions of separate items: Newcombe's interval, Statistics in Medicine 17 (1998), 873-890, method 10; Fisher's exact test."""
    a, b = a_correct / a_n, b_correct / b_n
    (low_a, high_a), (low_b, high_b) = wilson(a_correct, a_n), wilson(b_correct, b_n)
    low = b - a - math.hypot(b - low_b, high_a - a)
    high = b - a + math.hypot(high_b - b, a - low_a)
    from scipy.stats import fisher_exact

    error = math.sqrt(a * (1 - a) / a_n + b * (1 - b) / b_n)
    n = min(a_n, b_n)
    p = float(fisher_exact([[a_correct, a_n - a_correct], [b_correct, b_n - b_correct]]).pvalue)
    return Difference(a, b, low, high, p, n, n, error, "unpaired", smallest_step=1 / n)


def corrected(differences: Sequence[Difference]) -> list[Difference]:
    """The same with Holm's adjusted p, and the minimum detectable effect at the level that the strictest of these tests had."""
    adjusted = holm([one.p for one in differences])
    level = LEVEL / max(1, len(differences))
    normal = NormalDist()
    reach = normal.inv_cdf(1 - level / 2) + normal.inv_cdf(POWER)
    fewest = math.ceil(1 - math.log2(level))  # items that must all change in one direction for an exact p of at most `level`
    return [
        replace(one, adjusted_p=p, detectable=max(reach * one.standard_error, fewest * one.smallest_step))
        for one, p in zip(differences, adjusted, strict=True)
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of Holm's step-down procedure (Scandinavian Journal of Statistics 6, 1979)."""
    adjusted, most = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = most
    return adjusted


def sign_flip_p(differences: NDArray[np.float64], rng: np.random.Generator) -> float:
    """Two-sided p of the hypothesis that each unit's difference is as likely with the opposite sign.

    Exact for whole numbers, and then equal to McNemar's exact test where all are -1, 0 or 1; otherwise from random signs.
    """
    sizes, counts = np.unique(np.abs(differences[differences != 0]), return_counts=True)
    if not len(sizes):
        return 1.0
    observed = abs(math.fsum(differences))
    if np.array_equal(sizes, sizes.round()):
        return _exact_flips(sizes.astype(np.int64), counts, round(observed))
    more, limit = 0, observed * (1 - 1e-9)
    step = max(1, _CHUNK // len(sizes))
    for start in range(0, FLIPS, step):
        up = rng.binomial(counts, 0.5, size=(min(step, FLIPS - start), len(sizes)))
        more += int((np.abs((2 * up - counts) @ sizes) >= limit).sum())
    return (1 + more) / (1 + FLIPS)


def _exact_flips(sizes: NDArray[np.int64], counts: NDArray[np.int64], observed: int) -> float:
    from scipy.stats import binom

    chances = np.ones(1)  # of the sum of all signed differences, from its least value in steps of 1
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        steps = np.zeros(2 * size * count + 1)
        steps[:: 2 * size] = binom.pmf(np.arange(count + 1), count, 0.5)
        chances = np.convolve(chances, steps)
    middle = len(chances) // 2
    return min(1.0, float(2 * chances[middle + observed :].sum())) if observed else 1.0


def _resample(pairs: Sequence[Pairs], rng: np.random.Generator) -> NDArray[np.float64]:
    """(score, resample): mean differences of scores of one set, whose units are drawn together."""
    number = {unit: i for i, unit in enumerate(dict.fromkeys(unit for pair in pairs for unit in pair.units))}
    rows = np.zeros((len(number), 2 * len(pairs)))
    for s, pair in enumerate(pairs):
        index = np.array([number[unit] for unit in pair.units])
        np.add.at(rows[:, 2 * s], index, np.asarray(pair.b, np.float64) - np.asarray(pair.a, np.float64))
        np.add.at(rows[:, 2 * s + 1], index, 1.0)
    # a resample draws each distinct unit a multinomial number of times: the same law as drawing units, in far less memory
    distinct, counts = np.unique(rows, axis=0, return_counts=True)
    return _ratios(distinct, counts, rng).T


def _ratios(rows: NDArray[np.float64], counts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
    """(resample, score): sum of differences over sum of sizes. Columns of `rows` are difference, size, difference, size, ..."""
    units = int(counts.sum())
    parts, step = [], max(1, _CHUNK // len(rows))
    for start in range(0, RESAMPLES, step):
        drawn = rng.multinomial(units, counts / units, size=min(step, RESAMPLES - start)) @ rows
        parts.append(drawn[:, ::2] / np.maximum(drawn[:, 1::2], 1e-300))
    return np.concatenate(parts)


def _paired(pairs: Pairs, means: NDArray[np.float64]) -> Difference:
    a, b = np.asarray(pairs.a, np.float64), np.asarray(pairs.b, np.float64)
    units, index = np.unique(np.asarray(pairs.units), return_inverse=True)
    sums = np.bincount(index, b - a).astype(np.float64)
    low, high = _percentiles(means, max(1, len(units) - 1))
    constant = float((b - a).mean())
    if (b - a == constant).all():  # nothing varies, so a resample cannot: the exact bound for an event seen in none of the units
        unseen = 1 - (LEVEL / 2) ** (1 / len(units))
        low, high = (1 - unseen) * constant - unseen, (1 - unseen) * constant + unseen
    p = sign_flip_p(sums, np.random.default_rng(0))
    kind: Any = "paired, clustered" if pairs.clustered else "paired"
    n, error = len(a), float(means.std())
    return Difference(float(a.mean()), float(b.mean()), low, high, p, n, len(units), error, kind, smallest_step=1 / n)


def _percentiles(means: NDArray[np.float64], freedom: int) -> tuple[float, float]:
    """The expanded percentile interval (Hesterberg, The American Statistician 69, 2015): as wide as Student's for few units."""
    from scipy.special import ndtr, stdtrit

    outside = ndtr(math.sqrt((freedom + 1) / freedom) * stdtrit(freedom, LEVEL / 2))
    low, high = np.quantile(means, [outside, 1 - outside])
    return float(low), float(high)
