"""What a score of few items is worth: intervals, the level of guessing, and paired comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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

@dataclass(frozen=True)
class Difference:
    """Tuned minus base over the same items, with a 95% interval from a paired bootstrap (Efron 1979)."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def verdict(self) -> str:
        return "better" if self.low > 0 else "worse" if self.high < 0 else "no difference shown"

    def to_json(self) -> dict[str, float | int | str | list[float]]:
        return {"difference": self.mean, "interval": [self.low, self.high], "n": self.n, "verdict": self.verdict}


def paired_bootstrap(base: Sequence[float], tuned: Sequence[float], resamples: int = 10_000, seed: int = 0) -> Difference:
    """Difference of two models' means over the same items, resampled by item so that shared difficulty cancels."""
    if len(base) != len(tuned):
        raise ValueError(f"paired scores must cover the same items, not {len(base)} and {len(tuned)}")
    difference = np.asarray(tuned, np.float64) - np.asarray(base, np.float64)
    n = len(difference)
    if n == 0:
        return Difference(float("nan"), float("nan"), float("nan"), 0)
    # a resample of n items draws each distinct difference a multinomial number of times: same law, far less memory
    values, counts = np.unique(difference, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(n, counts / n, size=resamples)
    low, high = np.quantile(draws @ values / n, [0.025, 0.975])
    return Difference(float(difference.mean()), float(low), float(high), n)
