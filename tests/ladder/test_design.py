"""What a ladder does not determine is said, with the runs that mend it, and intervals away from the runs hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lmworks.errors import UserError
from lmworks.ladder.design import Point
from lmworks.ladder.fit import design_of, fit_law
from lmworks.ladder.points import fewest_parameters, size_and_tokens
from lmworks.plan.laws import LossLaw
from lmworks.recipe.load import load_recipe
from tiny_run import Tiny

LAW = LossLaw(1.0, 40.0, 150.0, 0.33, 0.35)
SIZES = np.geomspace(3e5, 4.8e6, 6)
NOISE = 0.003
Pairs = list[tuple[float, float]]
RIDGE: Pairs = [(n, 20 * n) for n in SIZES for _ in range(2)]
NEAR: Pairs = [(n, 20 * n * f) for n in SIZES for f in (0.97, 1.03)]
STEEP: Pairs = [(n, n**1.5 / 100) for n in SIZES for _ in range(2)]
ISO: Pairs = [(n, 3e13 / n) for n in SIZES for _ in range(2)]
GRID: Pairs = [(n, d) for n in SIZES[::2] for d in 20 * SIZES[1::2]]


def measured(pairs: Pairs, seed: int = 0) -> list[Point]:
    random = np.random.default_rng(seed)
    return [
        Point(float(n), float(d), LAW.loss(n, d) * float(np.exp(NOISE * random.standard_normal())), seed=index % 2)
        for index, (n, d) in enumerate(pairs)
    ]


def fitted(points: list[Point], seed: int = 0) -> LossLaw:
    return fit_law(points, "bits per byte", "planted", bootstraps=16, seed=seed)


@pytest.mark.parametrize(
    ("pairs", "untold", "line"),
    [
        (RIDGE, 3, "all of them have 20 tokens per parameter"), (NEAR, 3, "all of them have 19.4 to 20.6 tokens per parameter"),
        (STEEP, 3, "follow from the size (D ~ N^1.5)"), (ISO, 2, "follow from the size (D ~ N^-1)"), (GRID, 0, ""),
    ],
    ids=["ridge", "near", "steep", "iso", "grid"],
)  # fmt: skip
def test_what_a_design_leaves_open_is_named(pairs: Pairs, untold: int, line: str) -> None:
    """On a line of equal operations the optimum is told, and how the loss splits is not."""
    points = measured(pairs)
    law = fitted(points)
    design = design_of(law, points)
    assert len(design.untold) == untold and line in "; ".join(design.doubts)
    assert bool(law.undetermined) == bool(untold)
    assert ("compute-optimal size" in law.undetermined) == (untold == 3)


def test_the_proposed_runs_mend_it() -> None:
    """Each proposal is measured, and the law is fitted again: the optimal size is told, and is the planted one."""
    points = measured(RIDGE)
    design = design_of(fitted(points), points)
    assert 1 <= len(design.runs) <= 6
    ratios = [tokens / size for size, tokens in design.runs]
    assert min(ratios) < 10 or max(ratios) > 40, "off the line"
    more = [*points, *measured([*design.runs, *design.runs], 1)]
    law = fitted(more)
    assert "compute-optimal" not in law.undetermined
    flops = 6 * SIZES[-1] * 20 * SIZES[-1]
    optima = np.quantile([LossLaw(*one[:5]).optimal_parameters(flops) for one in law.samples], [0.05, 0.95])
    assert optima[0] < LAW.optimal_parameters(flops) < optima[1] < 4 * optima[0]


def test_no_size_is_proposed_that_no_model_has(tiny: Tiny) -> None:
    """The vocabulary does not shrink with the size. Half of the smallest size of the ladder is proposed where a model has it."""
    points = measured(RIDGE)
    for fewest, has_half in ((0.4, True), (0.6, False)):
        own = [replace(one, fewest=fewest * SIZES[0]) for one in points]
        assert any(size < 0.9 * SIZES[0] for size, _ in design_of(fitted(own), own).runs) == has_half
    recipe = load_recipe(tiny.recipe, ["size=0.001M"]).recipe
    fewest = fewest_parameters(tiny.resolve().recipe)
    assert fewest == pytest.approx(size_and_tokens(recipe)[0], rel=0.01) and fewest > size_and_tokens(tiny.resolve().recipe)[0]


def test_intervals_away_from_a_ridge_hold_and_say_why_they_are_wide() -> None:
    """Three ladders, each with a run of four times the size on a quarter of the tokens and the reverse. Without what the runs leave open,
    intervals held in a quarter of them."""
    held = 0
    for seed in range(3):
        law = fitted(measured(RIDGE, seed), seed)
        for size, tokens in ((4.8e6, 6e6), (3e5, 96e6)):
            interval = law.interval(size, tokens)
            assert interval is not None
            held += interval[0] <= LAW.loss(size, tokens) <= interval[1]
            question = law.open_question(size, tokens)
            assert question is not None and f"({tokens / size:.3g} tokens per parameter)" in question
        assert law.open_question(2.4e6, 48e6) is None, "on the ridge"
    assert held >= 5


@pytest.mark.parametrize("count", [3, 5])
def test_few_distinct_pairs_are_refused_with_the_runs_to_add(count: int) -> None:
    """22 runs, many seeds: repeating a pair is no new pair."""
    points = measured([(SIZES[index % count], 20 * SIZES[index % count]) for index in range(22)])
    with pytest.raises(UserError, match=f"22 runs at {count} distinct pairs .* determine a law of 6 parameters.* Add runs of ") as raised:
        fitted(points)
    assert str(raised.value).count(" parameters on ") == 7 - count
