"""Thousands of simulated ablations with the noise of real runs: how often equal arms get a verdict, and planted differences are found.

The noise is drawn from the values that equal runs of the tests' tiny recipe reached with different seeds (residuals.json, written by
benchmarks/ablations.py). A run is drawn as a whole, with all its measures, so their correlations are real; its skew is too.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from lmworks.ablate.contrast import contrast
from lmworks.ablate.measures import Reading
from lmworks.ablate.resolve import Experiment, resolve
from lmworks.ablate.results import Results
from lmworks.ablate.runs import recipe_of
from lmworks.ablate.verdict import FAMILY_WISE, POWER, Verdict, detectable_in_noise, judge
from lmworks.ablate.welch import root, t_power
from tiny_run import Tiny

ARMS, ABLATIONS = 4, 1000


def real() -> np.ndarray:
    """(runs, measures): deviations of equal runs from their mean, in standard deviations."""
    runs = json.loads((Path(__file__).parent / "residuals.json").read_text(encoding="utf-8"))["runs"]
    values = np.array([list(run.values()) for run in runs])
    return (values - values.mean(axis=0)) / values.std(axis=0)


def skewed() -> np.ndarray:
    """(runs, measures): a heavier skew than that of the real runs, as where a run now and then ends badly."""
    drawn = np.random.default_rng(7).lognormal(sigma=0.8, size=(400, 3))
    return (drawn - drawn.mean(axis=0)) / drawn.std(axis=0)


def draw(random: np.random.Generator, noise: np.ndarray, seeds: int, is_paired: bool, arms: int = ARMS) -> np.ndarray:
    """(arms, seeds, measures) of equal arms; where paired, runs of a seed share as much again."""
    found = noise[random.integers(len(noise), size=(arms, seeds))]
    return found + noise[random.integers(len(noise), size=(1, seeds))] if is_paired else found


def verdicts(values: np.ndarray, is_paired: bool) -> list[Verdict]:
    """The first arm is the baseline; measures within arms."""
    arms, _, measures = values.shape
    return judge([contrast(values[arm, :, one], values[0, :, one], is_paired) for arm in range(1, arms) for one in range(measures)])


def shown(values: np.ndarray, is_paired: bool) -> bool:
    return any(one.outcome in ("higher", "lower") for one in verdicts(values, is_paired))


@pytest.mark.parametrize(
    ("noise", "seeds", "is_paired"),
    [
        (real, 2, True), (real, 3, True), (real, 5, False), (skewed, 3, True),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((real, 3, False), (skewed, 5, False))),
    ],
)
def test_equal_arms_get_a_verdict_in_at_most_5_percent_of_ablations(noise: object, seeds: int, is_paired: bool) -> None:
    assert callable(noise)
    random, values = np.random.default_rng(1), noise()
    assert sum(shown(draw(random, values, seeds, is_paired), is_paired) for _ in range(ABLATIONS)) <= FAMILY_WISE * ABLATIONS


NOISY, QUIET = (3, *[1] * 8), (1, *[4] * 8)  # the baseline first
OTHERS = ((5, *[1] * 8), (10, *[1] * 8), (1, *[1] * 7, 3), (1, 0.3, 0.5, 1, 2, 3, 4, 5, 10))


@pytest.mark.parametrize(
    ("spreads", "seeds", "is_paired"),
    [
        (NOISY, 3, False), (QUIET, 5, False), (NOISY, 5, True),
        *(
            pytest.param(spreads, seeds, is_paired, marks=pytest.mark.slow)
            for spreads in (NOISY, QUIET, *OTHERS) for seeds in (2, 3, 4, 5, 10) for is_paired in (False, True)
        ),
    ],
)  # fmt: skip
def test_arms_of_unequal_spreads_get_a_verdict_in_at_most_5_percent(spreads: tuple[float, ...], seeds: int, is_paired: bool) -> None:
    """2,000 ablations of eight equal arms. With a floor pooled over all arms, a baseline three times as noisy makes it 20%; with Welch's
    approximate degrees of freedom, a quiet baseline makes it 6.5%. Two standard errors of 5% of 2,000 are 1%."""
    random, noise, scale = np.random.default_rng(8), real()[:, :1], np.array(spreads)[:, None, None]
    count = sum(shown(scale * draw(random, noise, seeds, False, len(spreads)), is_paired) for _ in range(2000))
    assert count <= (FAMILY_WISE + 0.01) * 2000


def test_the_unpaired_floor_holds_for_arms_that_share_noise() -> None:
    """Where few seeds are not paired (`pairing_pays`), what they share is in the floor and not in the differences."""
    random, noise = np.random.default_rng(5), real()
    ablations = (verdicts(draw(random, noise, 2, is_paired=True), is_paired=False) for _ in range(ABLATIONS))
    assert sum(any(one.outcome in ("higher", "lower") for one in found) for found in ablations) <= FAMILY_WISE * ABLATIONS


INIT, ORDER, REST = 0.000492, 0.0000818, 0.000498  # variances of a run's value by its initial weights, its data order, and all else


def test_copies_of_a_recipe_hold_the_level_and_their_floor_does(tiny: Tiny, tmp_path: Path) -> None:
    """Equal copies (`kind: noise`), and equal arms with one seed that assume the floor of these. The effects are drawn for what each run
    has: its initial weights by their seed, its data order by its own. With weights that were the same over seeds, 54% and 19% had a
    verdict."""
    random, ablations = np.random.default_rng(6), 200
    measures = {"recipe": str(tiny.recipe), "measures": ["validation/bits_per_byte"]}
    copies = Results(_resolved(tmp_path, "copies", measures | {"kind": "noise", "copies": 5, "seeds": 6}))
    arms = {f"arm-{number}": [f"optimizer.weight_decay=0.{number}"] for number in range(1, 5)}
    single = _resolved(tmp_path, "single", measures | {"arms": arms, "seeds": [1]})
    (measure,) = copies.experiment.measures

    def simulate(results: Results, own_weights: bool) -> bool:
        weights: dict[object, float] = defaultdict(lambda: random.normal(0, INIT**0.5))
        orders: dict[object, float] = defaultdict(lambda: random.normal(0, ORDER**0.5))
        for run in results.experiment.runs:
            recipe = recipe_of(run)
            drawn = weights[recipe.init_seed, run.arm.name if own_weights else ""] + orders[recipe.training_seed]
            results.readings[run.directory] = Reading({measure.name: drawn + random.normal(0, REST**0.5)})
        return any(one.outcome in ("higher", "lower") for one in judge([one for _, _, one in results.contrasts()]))

    among_copies = after = 0
    for _ in range(ablations):
        among_copies += simulate(copies, own_weights=False)
        floors = {kind: copies.floor(measure, *copies.complete(measure), kind == "paired")[0].to_json() for kind in ("paired", "unpaired")}
        after += simulate(Results(replace(single, earlier={measure.name: floors})), own_weights=True)
    most = FAMILY_WISE * ablations + 2 * (FAMILY_WISE * (1 - FAMILY_WISE) * ablations) ** 0.5
    assert among_copies <= most and after <= most, (among_copies, after)


def _resolved(folder: Path, name: str, keys: dict[str, object]) -> Experiment:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(keys | {"out": str(folder / name)}, sort_keys=False))
    return resolve(path)


def shift_for_power(df: float, level: float) -> float:
    """The difference, in standard errors, that is found with the power of the verdicts."""
    return root(lambda shift: t_power(shift, df, level) - POWER)


@pytest.mark.parametrize(("seeds", "is_paired"), [(3, True), (3, False), (5, True)])
def test_planted_differences_are_found_as_often_as_the_stated_power(seeds: int, is_paired: bool) -> None:
    """One arm differs in one measure, by what is stated as detectable for this noise. Real noise has no heavy tails, so the power holds."""
    random, noise = np.random.default_rng(2), real()
    measures = noise.shape[1]
    tests = (ARMS - 1) * measures
    paired = shift_for_power(seeds - 1, FAMILY_WISE / tests) * np.sqrt(2 / seeds)
    planted = paired if is_paired else detectable_in_noise(seeds, tests)
    found = wrong_sign = 0
    for _ in range(ABLATIONS):
        values = draw(random, noise, seeds, is_paired)
        values[2, :, 1] += planted
        one = verdicts(values, is_paired)[measures + 1]
        found += one.outcome == "higher"
        wrong_sign += one.outcome == "lower"
    assert found / ABLATIONS == pytest.approx(POWER, abs=0.05)
    assert wrong_sign <= 2


def test_what_is_stated_as_detectable_and_needed_agrees_with_what_is_found() -> None:
    """The figures of a verdict, estimated from its own ablation: on average the true ones."""
    random, noise = np.random.default_rng(3), real()
    seeds, measures = 5, noise.shape[1]
    stated = [one.detectable**2 for _ in range(200) for one in verdicts(draw(random, noise, seeds, True), True)]
    exact = shift_for_power(seeds - 1, FAMILY_WISE / ((ARMS - 1) * measures)) * np.sqrt(2 / seeds)
    assert np.sqrt(np.mean(stated)) == pytest.approx(exact, rel=0.05)

    difference, needed = 1.5, []  # too small for 3 seeds to find
    for _ in range(200):
        values = draw(random, noise, 3, True)
        values[2, :, 1] += difference
        one = verdicts(values, True)[measures + 1]
        if one.outcome == "no difference shown" and one.seeds_needed:
            needed.append(one.seeds_needed)
    enough = int(np.median(needed))
    found = 0
    for _ in range(300):
        values = draw(random, noise, enough, True)
        values[2, :, 1] += difference
        found += verdicts(values, True)[measures + 1].outcome == "higher"
    assert found / 300 > 0.6, f"{enough} seeds were said to be needed"
