"""Noise floors, contrasts, Holm's procedure and its intervals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from late import Late
from lmworks.ablate.contrast import UNKNOWN, Contrast, Noise, contrast, own_df, paired, pairing_pays, pooled, unpaired
from lmworks.ablate.verdict import detectable_in_noise, judge, seeds_needed
from lmworks.ablate.welch import nominal, size, t_two_sided

stats: Any = Late("scipy.stats")


def made(difference: float, se: float, df: float = 8, **more: float) -> Contrast:
    return Contrast(difference, se, df, 3, (Noise(se * math.sqrt(3), df),), True, df_per_seed=4, **more)  # type: ignore[arg-type]


def test_paired_arms_are_the_paired_t_test() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=(2, 6)) + random.normal(size=(1, 6)) * 5
    found = contrast(values[1], values[0], True)
    expected = stats.ttest_rel(values[1], values[0])
    assert (found.difference / found.se, found.p) == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue))


def test_unpaired_arms_are_the_test_of_welch_at_its_exact_size() -> None:
    values = np.random.default_rng(1).normal(size=(2, 6)) * [[1], [4]]
    found, expected = contrast(values[1], values[0], False), stats.ttest_ind(values[1], values[0], equal_var=False)
    assert (found.difference / found.se, found.df) == (pytest.approx(expected.statistic), pytest.approx(expected.df))
    assert t_two_sided(found.difference / found.se, found.df) == pytest.approx(expected.pvalue)
    assert found.p == pytest.approx(size(expected.pvalue, 5)) and found.p > expected.pvalue


@pytest.mark.parametrize(("seeds", "level"), [(2, 0.01), (3, 0.00625), (4, 0.00625), (5, 0.05)])
def test_the_size_of_welchs_test_is_the_simulated_one(seeds: int, level: float) -> None:
    """150,000 pairs at each ratio of spreads: the share with a p value at or below `level` is near the size at the worst."""
    random, shares = np.random.default_rng(2), []
    for ratio in (1, 3, 6, 10, 20, 40):
        one, other = random.normal(size=(150_000, seeds)), ratio * random.normal(size=(150_000, seeds))
        shares.append(float((stats.ttest_ind(one, other, axis=1, equal_var=False).pvalue <= level).mean()))
    assert max(shares) == pytest.approx(size(level, seeds - 1), rel=0.05), "scipy's own p value, counted"
    assert size(nominal(level, seeds - 1), seeds - 1) == pytest.approx(level, rel=1e-6)


def test_floors_are_unbiased_and_pairing_removes_what_seeds_share() -> None:
    random = np.random.default_rng(2)
    squares: dict[str, list[float]] = {"paired": [], "unpaired": []}
    for _ in range(2000):
        values = random.normal(size=(3, 3)) + 2 * random.normal(size=(1, 3))
        squares["paired"].append(paired(values).sd ** 2)
        squares["unpaired"].append(unpaired(values).sd ** 2)
    assert np.mean(squares["paired"]) == pytest.approx(1, rel=0.05)
    assert np.mean(squares["unpaired"]) == pytest.approx(1 + 4, rel=0.1)


def test_one_seed_has_no_floor_and_an_earlier_one_stands_in() -> None:
    one = np.array([[1.0], [2.0], [3.0]])
    assert paired(one) == UNKNOWN == unpaired(one)
    alone = contrast(one[1], one[0], True)
    assert judge([alone])[0].outcome == "no verdict"
    floor = pooled([UNKNOWN, Noise(0.1, 20)])
    assert judge([contrast(one[1], one[0], True, floor)])[0].outcome == "higher"
    assert pooled([Noise(1.0, 3), Noise(3.0, 1)]) == Noise(math.sqrt(3.0), 4)


def test_holm_and_intervals_agree() -> None:
    """Intervals exclude 0 exactly where there is a verdict, and the adjusted p values are Holm's."""
    random = np.random.default_rng(3)
    for _ in range(200):
        found = [made(float(random.normal() * 3), 1.0) for _ in range(7)]
        verdicts = judge(found)
        ordered = sorted(range(7), key=lambda index: found[index].p)
        running = 0.0
        for rank, index in enumerate(ordered):
            running = max(running, min(1.0, (7 - rank) * found[index].p))
            one = verdicts[index]
            assert one.adjusted_p == pytest.approx(running)
            assert (one.outcome != "no difference shown") == (running <= 0.05) == (one.low > 0 or one.high < 0)


def test_more_tests_need_larger_differences() -> None:
    lonely, crowded = judge([made(2.5, 1.0)])[0], judge([made(2.5, 1.0)] + [made(0.1, 1.0)] * 19)[0]
    assert (lonely.outcome, crowded.outcome) == ("higher", "no difference shown")
    assert crowded.detectable > lonely.detectable


def test_equal_values_everywhere_are_no_difference_and_no_error() -> None:
    values = np.ones((3, 4))
    assert judge([contrast(values[1], values[0], True)])[0].outcome == "no verdict"


def test_the_bound_on_the_noise_of_items_is_one() -> None:
    """Equal arms whose scores alone are known: over new seeds and new items no more than 5% of the tests at 5% show a difference."""
    random, seeds, items, shown = np.random.default_rng(6), 3, 50, 0
    for _ in range(2000):
        hard, tastes = random.normal(size=items), random.normal(size=(2, 1, items))  # each arm has items that it alone finds hard
        right = (hard + tastes + 0.5 * random.normal(size=(2, seeds, items)) > 0).astype(float)
        means = right.mean(axis=2)
        shown += contrast(means[0], means[1], False, unpaired(means), items).p <= 0.05
    assert shown / 2000 <= 0.05, "without the bound it is more than 20%"
    # One arm solves nearly all items and the other half of them: 0.75 * 0.25 + 0.5 * 0.5, per item.
    assert contrast(np.full(3, 0.75), np.full(3, 0.5), False, items=items).items == pytest.approx((0.1875 + 0.25) / items)


def test_noise_of_items_is_counted_once() -> None:
    """Simulated scores: the stated standard error is that of the difference over new seeds and new items."""
    random = np.random.default_rng(4)
    seeds, items = 4, 40
    differences, stated, seeds_alone = [], [], []
    for _ in range(1500):
        hard = random.normal(size=items)
        shift = 0.6 * random.normal(size=items)  # what the arm's change means for each item
        runs = random.normal(size=(2, seeds, 1)) * 0.15
        right = (random.normal(size=(2, seeds, items)) * 0.5 + hard + np.stack([shift, np.zeros(items)])[:, None] + runs > 0).astype(float)
        means = right.mean(axis=2)
        found = contrast(means[0], means[1], False, unpaired(means), right[0] - right[1])
        differences.append(found.difference)
        stated.append(found.se**2)
        seeds_alone.append(contrast(means[0], means[1], False, unpaired(means)).se ** 2)
    assert np.mean(stated) == pytest.approx(np.var(differences), rel=0.1)
    assert np.mean(seeds_alone) < 0.7 * np.mean(stated), "what is simulated has noise of items"


def test_the_variance_of_items_is_that_of_a_two_way_analysis() -> None:
    """(MS of items - MS of the rest) / (seeds * items), of a table that was made with a large part of each."""
    table = np.array([[3.0, -1.0, 4.0, 11.0], [-5.0, 1.0, 2.0, 9.0], [5.0, 3.0, 5.0, 18.0]])
    seeds, items = table.shape
    rows, columns, whole = table.sum(axis=1) / items, table.sum(axis=0) / seeds, table.sum() / table.size
    of_items = seeds * sum((columns[item] - whole) ** 2 for item in range(items)) / (items - 1)
    rest = sum((table[seed, item] - rows[seed] - columns[item] + whole) ** 2 for seed in range(seeds) for item in range(items))
    rest /= (seeds - 1) * (items - 1)
    assert of_items > rest
    found = contrast(rows, np.zeros(seeds), False, items=table)
    assert found.items == pytest.approx((of_items - rest) / (seeds * items)) and found.items_df == items - 1
    one = contrast(rows[:1], np.zeros(1), False, items=table[:1])
    assert one.items == pytest.approx(table[0].var(ddof=1) / items), "one seed has no rest"


def test_pairing_pays_where_its_lost_degrees_of_freedom_cost_less_than_half_of_the_variance() -> None:
    """Student's t: 4.303 (2), 2.776 (4), 2.571 (5), 2.228 (10); times sqrt(1/2), the paired one is 1.10 and 0.82 of the unpaired."""
    assert not pairing_pays(2, 4, 0.05) and pairing_pays(5, 10, 0.05)
    assert not pairing_pays(5, 10, 0.0001), "far out in the tails the degrees of freedom weigh more"
    assert pairing_pays(3, 0, 0.05) and not pairing_pays(0, 3, 0.05) and not pairing_pays(0, 0, 0.05)


def test_seeds_needed_grow_as_the_difference_shrinks() -> None:
    needed = [seeds_needed(made(size, 1.0), 0.05) for size in (3.0, 1.0, 0.3)]
    assert needed == sorted(needed) and needed[0] >= 4  # type: ignore[operator, type-var]
    assert seeds_needed(made(1e-6, 1.0), 0.05) is None
    assert seeds_needed(made(30.0, 1.0), 0.05) == 4, "more than there were"
    assert seeds_needed(made(0.5, 1.0, items=1.0), 0.05) is None, "more seeds do not help where the items are the noise"
    sizes = [detectable_in_noise(seeds, 4) for seeds in (1, 3, 10)]
    assert sizes[0] is None and sizes[1] > sizes[2]  # type: ignore[operator]


def test_degrees_of_freedom_of_the_noise_floor() -> None:
    """Pairs have no freedom in the arm that the others are compared with."""
    assert [own_df(arms, seeds, is_paired) for arms, seeds, is_paired in ((2, 4, True), (3, 5, True), (2, 4, False))] == [3, 8, 6]


def test_floors_are_pooled_by_their_degrees_of_freedom() -> None:
    found = pooled([Noise(0.5, 2), Noise(1.5, 4), UNKNOWN])
    assert (found.sd, found.df) == (pytest.approx(math.sqrt((2 * 0.25 + 4 * 2.25) / 6)), 6)
