"""Intervals cover, tests keep their level, and the exact ones equal their formulas."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from lmworks.evaluate import statistics
from lmworks.evaluate.statistics import Pairs, compare_bits, compare_counts, compare_pairs, corrected, holm, sign_flip_p


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    monkeypatch.setattr(statistics, "FLIPS", 999)


def ids(n: int) -> list[str]:
    return [str(i) for i in range(n)]


def one(a: np.ndarray, b: np.ndarray) -> statistics.Difference:
    return compare_pairs([Pairs("s", ids(len(a)), list(a), list(b))])[0][0]


@pytest.mark.usefixtures("few_resamples")
@pytest.mark.parametrize(("n", "gained", "lost"), [(60, 0.2, 0.1), (400, 0.04, 0.01)])
def test_the_interval_covers_in_95_of_100_samples(n: int, gained: float, lost: float) -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        kind = rng.choice(4, n, p=[gained, lost, 0.4, 0.6 - gained - lost])  # gained, lost, both right, both wrong
        found = one(np.isin(kind, (1, 2)).astype(float), np.isin(kind, (0, 2)).astype(float))
        covered += found.low <= gained - lost <= found.high
    assert 0.92 <= covered / 400 <= 0.98  # 0.95 with a standard deviation of 0.011


@pytest.mark.usefixtures("few_resamples")
def test_clusters_cover_where_items_alone_do_not() -> None:
    rng = np.random.default_rng(2)
    clustered = alone = 0
    for _ in range(300):
        lean = np.repeat(rng.normal(0, 0.25, 12), 20)  # a subject favors one model by its own amount
        a, b = (rng.random(240) < 0.5).astype(float), (rng.random(240) < np.clip(0.5 + lean, 0, 1)).astype(float)
        units = [str(i // 20) for i in range(240)]
        found = compare_pairs([Pairs("s", units, list(a), list(b), clustered=True)])[0][0]
        clustered += found.low <= 0 <= found.high
        single = one(a, b)
        alone += single.low <= 0 <= single.high
    assert 0.92 <= clustered / 300 <= 0.985
    assert alone / 300 < 0.85


@pytest.mark.usefixtures("few_resamples")
def test_bits_per_byte_cover_with_long_and_short_documents() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        sizes = rng.integers(100, 3000, 40)
        a = sizes * rng.normal(1.0, 0.2, 40)
        b = a + sizes * rng.normal(-0.05, 0.1, 40)
        found = compare_bits(list(a), list(b), list(sizes))
        covered += found.low <= -0.05 <= found.high
    assert 0.92 <= covered / 300 <= 0.98


@pytest.mark.usefixtures("few_resamples")
def test_equal_models_differ_somewhere_in_at_most_5_of_100_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 50)  # verdicts follow the tests
    rng = np.random.default_rng(4)
    false = uncorrected = 0
    for _ in range(200):
        pairs = []
        for number in range(6):
            n = int(rng.integers(60, 200))
            ability = rng.random(n)
            a, b = (1.0 * (ability + rng.normal(0, 0.3, n) < 0.5) for _ in "ab")
            pairs.append(Pairs(str(number), ids(n), list(a), list(b)))
        each, pooled = compare_pairs(pairs)
        assert pooled is not None
        every = corrected([*each, pooled])
        false += any(found.verdict != "no difference shown" for found in every)
        uncorrected += any(found.p <= 0.05 for found in every)
    assert false / 200 <= 0.05
    assert uncorrected / 200 > 0.15  # what the correction is for


@pytest.mark.usefixtures("few_resamples")
def test_the_minimum_detectable_effect_is_shown_in_80_of_100_samples() -> None:
    rng = np.random.default_rng(5)
    n, gain, lose = 500, 0.16, 0.08
    draw = lambda: rng.choice([1.0, -1.0, 0.0], n, p=[gain, lose, 1 - gain - lose])  # noqa: E731
    shown, reach = 0, []
    for _ in range(300):
        d = draw()
        found = corrected([one(np.where(d < 0, 1.0, 0.0), np.where(d > 0, 1.0, 0.0))])[0]
        shown += found.verdict == "better"
        reach.append(found.detectable)
    # the true difference of 0.08 is 1.3 times the detectable one, at which the power is 95%
    assert np.mean(reach) == pytest.approx((1.96 + 0.8416) * math.sqrt((gain + lose - 0.0064) / n), rel=0.03)
    assert 0.9 < shown / 300 <= 1.0


def test_mcnemar_is_the_binomial_formula() -> None:
    for better, worse in ((1, 8), (5, 5), (0, 6), (30, 12)):
        d = np.array([1.0] * better + [-1.0] * worse + [0.0] * 7)
        tail = sum(math.comb(better + worse, k) for k in range(min(better, worse) + 1)) / 2 ** (better + worse)
        assert sign_flip_p(d, np.random.default_rng(0)) == pytest.approx(min(1, 2 * tail) if better != worse else 1.0)


def test_sign_flips_equal_the_enumeration() -> None:
    whole = np.array([3.0, -1.0, 2.0, 2.0, 0.0, 5.0, -4.0, 1.0])
    for d in (whole, whole + 0.123):
        sums = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((1, -1), repeat=len(d))]
        truth = np.mean([s >= abs(d.sum()) - 1e-9 for s in sums])
        assert sign_flip_p(d, np.random.default_rng(0)) == pytest.approx(truth, abs=1e-12 if d is whole else 0.01)


def test_newcombe_and_fisher_equal_published_values() -> None:
    found = compare_counts(48, 80, 56, 70)  # Newcombe (1998), table II, method 10, example (a): 56/70 - 48/80
    assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert found.standard_error == pytest.approx(math.sqrt(0.6 * 0.4 / 80 + 0.8 * 0.2 / 70))
    assert compare_counts(3, 4, 1, 4).p == pytest.approx(34 / 70)  # Fisher's tea tasting, two-sided
    assert compare_counts(0, 9, 0, 7).p == pytest.approx(1)


def test_holm_equals_its_definition() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


def test_equal_outcomes_have_an_interval_and_no_verdict() -> None:
    same = np.array([1.0, 0.0] * 50)
    found = corrected([one(same, same)])[0]
    assert found.p == 1 and found.verdict == "no difference shown"
    assert (found.low, found.high) == pytest.approx((-0.0362, 0.0362), abs=1e-4)  # 1 - 0.025 ** (1 / 100)
    assert found.detectable == pytest.approx(0.06)  # six items of 100 that all change alike: 2 / 2**6 is below 5%


def test_an_item_in_two_formulations_is_one_unit() -> None:
    rng = np.random.default_rng(6)
    a, b = (rng.random(200) < 0.5).astype(float), (rng.random(200) < 0.6).astype(float)
    twice = [Pairs("s", ids(200), list(a), list(b)), Pairs("s", ids(200), list(a), list(b))]
    (first, _), pooled = compare_pairs(twice)
    assert pooled is not None
    assert pooled.units == 200
    assert pooled.standard_error == pytest.approx(first.standard_error)  # as two sets of other items it would be 0.71 of it
    assert pooled.p == pytest.approx(first.p, abs=0.01)


def test_few_units_have_the_wider_interval_of_student() -> None:
    """Expanded percentiles: with 4 degrees of freedom the tails of -sqrt(5/4) t = -3.10, 0.1%, and not 2.5%."""
    means = np.linspace(0, 1, 100_001)
    assert statistics._percentiles(means, 100_000) == pytest.approx((0.025, 0.975), abs=1e-4)
    assert statistics._percentiles(means, 4) == pytest.approx((0.00096, 0.99904), abs=2e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7])
def test_the_expanded_percentile_interval(freedom: int) -> None:
    """Hesterberg 2015, section 5.4: quantiles at Phi(sqrt(n / (n - 1)) t) in place of 2.5%."""
    outside = stats.norm.cdf(math.sqrt((freedom + 1) / freedom) * stats.t.ppf(0.025, freedom))
    means = np.linspace(0, 1, 100_001)
    assert statistics._percentiles(means, freedom) == pytest.approx((outside, 1 - outside), abs=1e-4)


def test_resamples_are_as_many_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_CHUNK", 3_000)
    rows, counts = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([5, 5])
    assert statistics._ratios(rows, counts, np.random.default_rng(0)).shape == (statistics.RESAMPLES, 1)


def test_the_smallest_step_of_a_mean_of_scores() -> None:
    """One item more or less of the largest set changes the mean of two by 1 / (2 n)."""
    pairs = [Pairs("a", ["1", "2", "3"], [0, 1, 1], [1, 1, 0]), Pairs("b", ["1", "2", "3", "4"], [0, 1, 1, 0], [1, 1, 0, 0])]
    _, mean = compare_pairs(pairs)
    assert mean is not None and mean.smallest_step == pytest.approx(1 / 8)
