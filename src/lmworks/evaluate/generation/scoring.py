"""Scores of values between 0 and 1, one per item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lmworks.evaluate.statistics import Score


def bootstrap(values: Sequence[float], resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95% percentile interval of the mean over items (Efron 1979)."""
    distinct, counts = np.unique(np.asarray(values, np.float64), return_counts=True)
    draws = np.random.default_rng(seed).multinomial(len(values), counts / len(values), size=resamples)
    low, high = np.quantile(draws @ distinct / len(values), [0.025, 0.975])
    return float(low), float(high)


def score_of(values: Sequence[float], baseline: float = 0.0) -> dict[str, Any]:
    """The mean with its 95% interval and verdict: Wilson's where every item is right or wrong, else a bootstrap over the items."""
    correct = sum(value == 1 for value in values)
    score = Score(correct, len(values), 0.0, baseline)
    entry: dict[str, Any] = score.to_json()
    if all(value in (0, 1) for value in values):
        return entry
    low, high = bootstrap(values)
    verdict = "above baseline" if low > baseline else "not above baseline"
    return entry | {"score": sum(values) / len(values), "interval": [low, high], "verdict": verdict}
