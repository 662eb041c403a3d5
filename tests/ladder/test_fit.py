"""The fit of a scaling law: planted laws are found, and prediction intervals hold as often as they say."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from lmworks.errors import UserError
from lmworks.ladder.design import Point
from lmworks.ladder.fit import _Prior, doubts, fit_law, noise_of, residual
from lmworks.plan.laws import LossLaw

LAW = LossLaw(1.0, 40.0, 150.0, 0.33, 0.35)
KAPLAN = LossLaw(0.0, 1e6, 4e6, 0.9, 0.87, gamma=0.2)
SIZES = (3e5, 6e5, 1.2e6, 2.4e6)
TARGET = (4.8e6, 4.8e6)  # four times the operations of the largest run


def points(noise: float, seed: int, law: LossLaw = LAW) -> list[Point]:
    """Runs of four sizes and four horizons, each with its own noise."""
    random = np.random.default_rng(seed)
    return [
        Point(n, d, law.loss(n, d) * float(np.exp(noise * random.standard_normal())), seed=index % 2)
        for n in SIZES for index, d in enumerate(SIZES)
    ]


def test_a_law_without_noise_is_found() -> None:
    found = fit_law(points(0.0, 0), "bits per byte", "planted", bootstraps=0)
    assert (found.e, found.alpha, found.beta) == pytest.approx((1.0, 0.33, 0.35), rel=0.02)
    assert found.loss(*TARGET) == pytest.approx(LAW.loss(*TARGET), abs=1e-4)
    assert found.loss(1e9, 2e10) == pytest.approx(LAW.loss(1e9, 2e10), abs=0.01), "far away too"


def test_a_law_without_an_irreducible_loss_is_found() -> None:
    """Under it a larger model learns more from the same additional tokens, which a sum of two powers cannot describe."""
    runs = points(0.001, 0, KAPLAN)
    found = fit_law(runs, "bits per byte", "planted", bootstraps=20)
    assert found.gamma < 0.5 and f")^{found.gamma:.3f}" in found.formula
    assert found.loss(*TARGET) == pytest.approx(KAPLAN.loss(*TARGET), rel=0.005)
    assert residual(found, runs) < 0.002 and doubts(found, runs) == []
    assert max(one[0] for one in found.samples) > 0.1, "these runs do not show whether there is a small irreducible loss"
    interval = found.interval(*TARGET)
    assert interval is not None and interval[0] < KAPLAN.loss(*TARGET) < interval[1]
    assert found.e == 0 and found.loss(*TARGET) < found.predict(*TARGET) == pytest.approx(KAPLAN.loss(*TARGET), rel=0.005)


@pytest.mark.slow
def test_intervals_of_90_percent_hold_about_as_often() -> None:
    """12 ladders with 0.3% noise, each with one target. Fewer than 8 hits have a probability of 0.4% at 90% coverage. 12 hits do not show
    that intervals are not too wide, so their width is bounded too: 0.055 on average in 30 other ladders."""
    hits, widths = 0, []
    for seed in range(12):
        law = fit_law(points(0.003, seed), "bits per byte", "planted", bootstraps=12, seed=seed)
        actual = LAW.loss(*TARGET) * float(np.exp(0.003 * np.random.default_rng(1000 + seed).standard_normal()))
        interval = law.interval(*TARGET)
        assert interval is not None
        hits += interval[0] <= actual <= interval[1]
        widths.append(interval[1] - interval[0])
    assert hits >= 8
    assert 0.02 < float(np.mean(widths)) < 0.12


EARLY = {  # held-out bits per byte of real runs by size, after 205k, 410k, 819k and 1,638k tokens (LOG.md)
    91_104: (2.7013, 2.4539, 2.3032, 2.2106), 149_168: (2.5807, 2.3736, 2.2193, 2.0900), 223_936: (2.5366, 2.3387, 2.1691, 2.0230),
    369_456: (2.5156, 2.3185, 2.1106, 1.9424), 499_776: (2.5222, 2.3305, 2.1303, 1.9256),
}  # fmt: skip


def test_what_speaks_against_a_law_is_told() -> None:
    """Losses of real runs that are too short: larger models still learn faster with every doubling of the tokens."""
    runs = [Point(size, 204_800 << index, loss) for size, losses in EARLY.items() for index, loss in enumerate(losses)]
    law = fit_law(runs, "bits per byte", "real", bootstraps=0)
    assert residual(law, runs) == pytest.approx(0.0081, abs=0.0005)
    described, one_seed = doubts(law, runs)
    assert "each size has one seed" in one_seed
    assert "only to within 0.8%" in described and "leave out the runs with the fewest tokens" in described
    steep = [Point(one.parameters, one.tokens, LAW.loss(1e6, one.tokens) + 0.5 * (one.parameters == SIZES[0])) for one in points(0.0, 0)]
    *_, limit = doubts(fit_law(steep, "bits per byte", "planted", bootstraps=0), steep)
    assert limit.startswith("alpha is at its limit")
    planted = fit_law(points(0.003, 1), "bits per byte", "planted", bootstraps=0)
    assert doubts(planted, points(0.003, 1)) == [] and 0.001 < residual(planted, points(0.003, 1)) < 0.004


def test_one_bad_run_moves_the_law_little() -> None:
    """The Huber loss: one of 16 runs is off by 5%."""
    bad = points(0.001, 3)
    bad[5] = Point(bad[5].parameters, bad[5].tokens, 1.05 * bad[5].loss)
    found = fit_law(bad, "bits per byte", "planted", bootstraps=0)
    assert found.loss(*TARGET) == pytest.approx(LAW.loss(*TARGET), abs=0.02)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (lambda p: True, ""),
        (lambda p: p.parameters < 5e5 and p.tokens < 1e6, "2 runs do not determine a law of 6 parameters: name at least 7 finished runs"),
        (lambda p: p.parameters < 1e6, "at least 3 sizes and 3 token budgets, and the runs have 2 and 4"),
        (lambda p: p.tokens < 1e6, "the runs have 4 and 2"),
    ],
)
def test_too_few_runs_are_refused(kept, message: str) -> None:  # type: ignore[no-untyped-def]
    chosen = [point for point in points(0.0, 0) if kept(point)]
    if not message:
        fit_law(chosen, "", "", bootstraps=0)
        return
    with pytest.raises(UserError, match=message):
        fit_law(chosen, "", "", bootstraps=0)


def test_a_run_without_a_loss_is_refused() -> None:
    with pytest.raises(UserError, match="no finite loss"):
        fit_law([*points(0.0, 0), Point(1e6, 1e6, float("nan"))], "", "")


def seeded(noise: float, common: float, random: np.random.Generator, seeds: int = 3) -> list[Point]:
    """Runs whose noise is in part that of their size and seed."""
    return [
        Point(n, d, LAW.loss(n, d) * float(np.exp(of_pair + noise * random.standard_normal())), seed=seed)
        for n in SIZES for seed in range(seeds) for of_pair in [common * random.standard_normal()] for d in SIZES
    ]  # fmt: skip


def spread_of_fits(law: LossLaw) -> float:
    return float(np.std([LossLaw(*one[:5], gamma=one[6]).loss(*TARGET) for one in law.samples]))


def test_noise_that_the_runs_of_a_seed_have_in_common_counts() -> None:
    """It does not average out over horizons, so an interval that took it for that of single runs would be too narrow."""
    runs = seeded(0.001, 0.005, np.random.default_rng(1), 8)
    law = fit_law(runs, "bits per byte", "planted", bootstraps=40)
    assert np.median([one[5] for one in law.samples]) == pytest.approx(0.0051, rel=0.3)
    assert noise_of(law, runs) == (pytest.approx(0.001, rel=0.6), pytest.approx(0.005, rel=0.3))
    single = fit_law([Point(one.parameters, one.tokens, one.loss) for one in runs], "", "", bootstraps=40)
    assert spread_of_fits(law) > 1.1 * spread_of_fits(single)
    own = fit_law([Point(one.parameters, one.tokens, one.loss, seed=index) for index, one in enumerate(runs)], "", "", bootstraps=5)
    assert own.samples == fit_law([Point(one.parameters, one.tokens, one.loss) for one in runs], "", "", bootstraps=5).samples
    quiet = fit_law(seeded(0.003, 0.0, np.random.default_rng(1), 8), "bits per byte", "planted", bootstraps=40)
    assert np.median([one[5] for one in quiet.samples]) == pytest.approx(0.003, rel=0.3), "none in common"
    draws = [noise_of(quiet, seeded(0.003, 0.0, np.random.default_rng(seed), 8))[1] for seed in range(9)]
    assert np.median(draws) < 0.0005, "the means of pairs differ by the noise of their runs, which is not noise in common"


@pytest.mark.slow
def test_intervals_hold_where_seeds_differ() -> None:
    """As above, with noise of size and seed: fewer than 8 of 12 hits have a probability of 0.4%."""
    hits = 0
    for seed in range(12):
        random = np.random.default_rng(seed)
        law = fit_law(seeded(0.001, 0.005, random, 2), "bits per byte", "planted", bootstraps=20, seed=seed)
        low, high = law.interval(*TARGET) or (0, 0)
        hits += low <= LAW.loss(*TARGET) * float(np.exp(0.0051 * random.standard_normal())) <= high
    assert hits >= 8


def test_the_gradient_of_the_prior_is_that_of_its_penalty() -> None:
    random = np.random.default_rng(2)
    prior = _Prior.drawn(random, np.array([1e6, 3e6]), np.array([2e7, 9e7]), 0.01)
    for _ in range(5):
        theta = np.array([0.3, 4.0, 5.0, 0.35, 0.3, 0.1]) * random.uniform(0.7, 1.4, 6)
        numeric = approx_fprime(theta, lambda one: prior.penalty(one)[0], 1e-7)
        assert prior.penalty(theta)[1] == pytest.approx(numeric, rel=1e-3, abs=1e-4 * np.abs(numeric).max())
