"""Thousands of simulated ablations with the noise of real runs: how often equal arms get a verdict, and planted differences are found.

The noise is drawn from the values that equal runs of the tests' tiny recipe reached with different seeds (residuals.json, written by
benchmarks/ablations.py). A run is drawn as a whole, with all its measures, so their correlations are real; its skew is too.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lmworks.ablate.statistics.contrast import contrast
from lmworks.ablate.statistics.noise import floor
from lmworks.ablate.statistics.student import shift_for_power
from lmworks.ablate.statistics.verdict import FAMILY_WISE, POWER, Verdict, judge

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


def draw(random: np.random.Generator, noise: np.ndarray, seeds: int, is_paired: bool) -> np.ndarray:
    """(arms, seeds, measures) of equal arms; where paired, runs of a seed share as much again."""
    found = noise[random.integers(len(noise), size=(ARMS, seeds))]
    return found + noise[random.integers(len(noise), size=(1, seeds))] if is_paired else found


def verdicts(values: np.ndarray, is_paired: bool) -> list[Verdict]:
    """The first arm is the baseline; measures within arms."""
    tables = [values[:, :, measure] for measure in range(values.shape[2])]
    floors = [floor(table, is_paired) for table in tables]
    return judge([
        contrast(table[arm], table[0], one.noise, one.arms, is_paired, own=bool({0, arm} & one.apart))
        for arm in range(1, ARMS) for table, one in zip(tables, floors, strict=True)
    ])  # fmt: skip


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
    ablations = (verdicts(draw(random, values, seeds, is_paired), is_paired) for _ in range(ABLATIONS))
    some = sum(any(one.outcome in ("higher", "lower") for one in found) for found in ablations)
    assert some <= FAMILY_WISE * ABLATIONS


def test_the_unpaired_floor_holds_for_arms_that_share_noise() -> None:
    """Where few seeds are not paired (`pairing_pays`), what they share is in the floor and not in the differences."""
    random, noise = np.random.default_rng(5), real()
    ablations = (verdicts(draw(random, noise, 2, is_paired=True), is_paired=False) for _ in range(ABLATIONS))
    assert sum(any(one.outcome in ("higher", "lower") for one in found) for found in ablations) <= FAMILY_WISE * ABLATIONS


@pytest.mark.parametrize(("seeds", "is_paired"), [(3, True), (3, False), (5, True)])
def test_planted_differences_are_found_as_often_as_the_stated_power(seeds: int, is_paired: bool) -> None:
    """One arm differs in one measure, by what is stated as detectable for this noise. Real noise has no heavy tails, so the power holds."""
    random, noise = np.random.default_rng(2), real()
    measures = noise.shape[1]
    df = (ARMS - 1 if is_paired else ARMS) * (seeds - 1)
    planted = shift_for_power(POWER, df, FAMILY_WISE / ((ARMS - 1) * measures)) * np.sqrt(2 / seeds)
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
    stated = [one.detectable for _ in range(100) for one in verdicts(draw(random, noise, seeds, True), True)]
    exact = shift_for_power(POWER, (ARMS - 1) * (seeds - 1), FAMILY_WISE / ((ARMS - 1) * measures)) * np.sqrt(2 / seeds)
    assert np.mean(stated) == pytest.approx(exact, rel=0.05)

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


def test_one_noisy_arm_is_judged_by_its_own_spread() -> None:
    """An arm that is ten times as noisy hardly ever gets a verdict by chance, and the others still do where they differ."""
    random, noise = np.random.default_rng(4), real()[:, :1]
    false, found = 0, 0
    for _ in range(400):
        values = draw(random, noise, 5, False)
        values[1] *= 10
        values[2, :, 0] += 20  # above the floor that the noisy arm raises
        noisy, other, _ = verdicts(values, False)
        false += noisy.outcome != "no difference shown"
        found += other.outcome == "higher"
    assert false <= 0.05 * 400
    assert found > 0.9 * 400
