"""What a score of few items is worth: intervals, and the level of guessing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
