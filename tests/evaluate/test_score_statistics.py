from __future__ import annotations

import math

import pytest

from lmworks.evaluate.statistics import Score, pooled, wilson


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


def test_each_item_counts_once_in_a_pooled_score() -> None:
    assert pooled([Score(1, 10, 0.5, 0.6), Score(80, 90, 0.25, 0.3)]) == Score(81, 100, pytest.approx(0.275), pytest.approx(0.33))
