from __future__ import annotations

import math

import numpy as np
import pytest

from lmworks.evaluate.statistics import Score, paired_bootstrap, wilson


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        # Newcombe (1998), Statistics in Medicine 17, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0000),
    ],
)
def test_wilson_equals_published_values(correct: int, n: int, low: float, high: float) -> None:
    assert wilson(correct, n) == pytest.approx((low, high), abs=5e-5)  # the table prints four digits


def test_wilson_ends_satisfy_the_score_equation() -> None:
    for correct, n in ((3, 11), (70, 200), (199, 200)):
        for end in wilson(correct, n):
            assert abs(correct / n - end) / math.sqrt(end * (1 - end) / n) == pytest.approx(1.959963984540054, rel=1e-9)


def test_wilson_refuses_what_is_no_proportion() -> None:
    with pytest.raises(ValueError, match="5 of 4"):
        wilson(5, 4)


def test_verdict_needs_the_whole_interval_beyond_the_baseline() -> None:
    assert Score(30, 100, 0.25, 0.25).verdict == "at chance"  # 30% looks better than 25%, but its interval is 22 to 40
    assert Score(40, 100, 0.25, 0.25).verdict == "above chance"
    assert Score(10, 100, 0.25, 0.25).verdict == "below chance"
    assert Score(0, 0, 0.25, 0.25).verdict == "not measured"
    # always saying yes gets 62% of BoolQ: over the blind guess's 50%, yet worth nothing
    assert Score(1240, 2000, 0.5, 0.5).verdict == "above chance"
    assert Score(1240, 2000, 0.5, 0.62).verdict == "at chance"
    assert Score(1100, 2000, 0.5, 0.62).verdict == "at chance"  # under the baseline, but not under chance
    assert Score(0, 50, 0.0, 0.4).verdict == "not above baseline"
    assert Score(40, 50, 0.0, 0.4).verdict == "above baseline"


def test_paired_bootstrap_agrees_with_the_normal_interval() -> None:
    rng = np.random.default_rng(1)
    base = rng.random(2000) < 0.5
    tuned = np.where(rng.random(2000) < 0.2, True, base)
    difference = paired_bootstrap(base, tuned)
    paired = tuned.astype(float) - base.astype(float)
    half = 1.96 * paired.std() / math.sqrt(len(paired))
    assert difference.mean == pytest.approx(paired.mean())
    # 10,000 resamples place a quantile to about 2% of the half width; 10% leaves room and catches a wrong factor
    assert difference.high - difference.mean == pytest.approx(half, rel=0.1)
    assert difference.mean - difference.low == pytest.approx(half, rel=0.1)
    assert difference.verdict == "better"


def test_paired_bootstrap_sees_no_difference_where_there_is_none() -> None:
    same = [True, False, True, True]
    assert paired_bootstrap(same, same) == paired_bootstrap(same, same)
    assert paired_bootstrap(same, same).verdict == "no difference shown"
    assert paired_bootstrap([1, 1, 0, 0], [0, 0, 1, 1]).verdict == "no difference shown"
    assert paired_bootstrap([True] * 30, [False] * 30).verdict == "worse"
    with pytest.raises(ValueError, match="same items"):
        paired_bootstrap([1.0], [1.0, 0.0])
