"""Early-signal quality, rank correlations, the parabola and the gradient noise scale."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy import stats

from lmworks.ablate import conclusions
from lmworks.ablate.conclusions import _optimum_text, fit_parabola, from_norms, measure_noise_scale
from lmworks.ablate.contrast import Noise
from lmworks.ablate.quality import _around_lines, kendall, quality, spearman
from lmworks.ablate.verdict import is_above
from lmworks.checkpoint import listing
from lmworks.recipe.load import load_recipe
from lmworks.recipe.weights import find_weights
from lmworks.shards.batches import Batches
from lmworks.train.curriculum import PretrainingCurriculum
from lmworks.weights.run_models import load_checkpoint
from tiny_run import Tiny


def curves(spread: float, over_seeds: float, wavering: float, slope: float = 5.0, arms: int = 4, points: int = 12) -> np.ndarray:
    """Losses (arms, seeds, points) that fall by `slope` and end apart by `spread` between neighboring arms."""
    random = np.random.default_rng(0)
    course = -slope * np.linspace(0, 1, points)
    found = course + spread * np.arange(arms)[:, None, None] * np.linspace(0.3, 1, points)
    return found + over_seeds * random.normal(size=(arms, 3, 1)) + wavering * random.normal(size=(arms, 3, points))


def test_what_does_not_vary_has_no_rank_correlation() -> None:
    assert spearman(np.ones(5), np.arange(5)) == 0 == kendall(np.ones(5), np.arange(5))
    assert spearman(np.array([1.0, 3, 2]), np.array([1.0, 3, 2])) == 1 == kendall(np.arange(3), np.arange(3))


def test_a_measure_that_separates_the_arms_is_trusted() -> None:
    found = quality(curves(spread=0.5, over_seeds=0.02, wavering=0.01), lower_is_better=True, is_paired=False)
    assert found.reasons == [] and found.to_json()["trust"]
    assert found.monotonicity > 0.9 and found.rank_halves == 1 and found.rank_seeds == 1  # type: ignore[operator]
    assert found.signal_to_noise == pytest.approx(1.5 / 0.022, rel=0.8)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"spread": 0.001}, "cannot be told apart"),
        ({"wavering": 3.0, "slope": 0.0}, "does not improve steadily"),
        ({"over_seeds": 5.0}, "seeds disagree"),
    ],
)
def test_why_a_measure_is_not_trusted(change: dict[str, float], reason: str) -> None:
    found = quality(curves(**({"spread": 0.5, "over_seeds": 0.02, "wavering": 0.01} | change)), lower_is_better=True, is_paired=False)  # type: ignore[arg-type]
    assert any(reason in one for one in found.reasons), found.reasons
    assert not found.to_json()["trust"]


def test_direction_and_chance() -> None:
    rising = -curves(spread=0.5, over_seeds=0.02, wavering=0.01)
    assert quality(rising, lower_is_better=False, is_paired=False).reasons == []
    assert quality(rising, lower_is_better=True, is_paired=False).monotonicity < -0.9  # type: ignore[operator]
    assert "no arm is shown to be above chance" in quality(rising, lower_is_better=False, is_paired=False, above_chance=False).reasons


def test_arms_that_guess_are_seldom_above_chance_and_good_ones_are() -> None:
    """Four arms with three seeds that guess on the same 60 items with 4 choices: in at most 5% of ablations one of them counts as above."""
    random, level = np.random.default_rng(4), 0.05 / 4
    by_items, by_seeds = 0, 0
    for _ in range(500):
        guesses = random.binomial(60, 0.25, size=(4, 3)) / 60
        by_items += any(is_above(arm, 0.25, 60, level) for arm in guesses)
        by_seeds += any(is_above(arm, 0.25, None, level) for arm in guesses)
    assert by_items / 500 <= 0.05 and by_seeds / 500 <= 0.05
    assert is_above(np.full(3, 30 / 60), 0.25, 60, level) and not is_above(np.full(3, 15 / 60), 0.25, 60, level)
    assert not is_above(np.full(3, 0.1), 0.25, 60, level) and is_above(np.array([0.5, 0.52, 0.51]), 0.25, None, level)
    assert not is_above(np.array([0.5]), 0.25, None, level), "one seed without a number of items shows nothing"


def test_a_curve_may_be_of_another_sample_than_the_final_values() -> None:
    """Final values that are all 0.3 higher than the last points are no step of the curve, and the order of the arms is theirs."""
    sampled = -curves(spread=0.5, over_seeds=0.02, wavering=0.01)
    final = sampled[:, :, -1] + 0.3
    found = quality(sampled, lower_is_better=False, is_paired=False, final=final)
    own = quality(sampled, lower_is_better=False, is_paired=False).to_json()
    assert found.to_json() == {key: pytest.approx(value) for key, value in own.items()}  # 0.3 is added and taken away in float64
    backward = quality(sampled, lower_is_better=False, is_paired=False, final=final[::-1])
    assert backward.rank_halves == -1 and backward.rank_seeds == 1


def test_the_order_of_arms_needs_two_of_them() -> None:
    several = curves(spread=0.5, over_seeds=0.02, wavering=0.01)
    two, one = (quality(several[:arms], lower_is_better=True, is_paired=False) for arms in (2, 1))
    assert two.rank_halves == 1 and two.rank_seeds == 1
    assert (one.rank_halves, one.rank_seeds) == (None, None)


def test_a_final_value_without_a_curve_and_a_single_seed() -> None:
    found = quality(np.array([[[1.0]], [[2.0]]]), lower_is_better=True, is_paired=False)
    assert (found.monotonicity, found.rank_halves, found.signal_to_checkpoints, found.rank_seeds) == (None, None, None, None)
    assert found.reasons == ["noise over seeds was not measured"]


def test_the_interval_of_the_optimum_covers_it() -> None:
    random, rates = np.random.default_rng(2), 0.004 * 2.0 ** np.arange(-2, 3)
    best, inside = 0.005, 0
    for _ in range(400):
        values = 0.05 * np.log2(rates / best) ** 2 + random.normal(size=5) * 0.02 / np.sqrt(3)
        found = fit_parabola(rates, values, Noise(0.02, 8), 3)
        inside += found.low is None or found.low <= best <= found.high  # type: ignore[operator]
    assert inside / 400 >= 0.93
    exact = fit_parabola(rates, 0.05 * np.log2(rates / best) ** 2 + 1, Noise(0.02, 8), 3)
    assert exact.best == pytest.approx(best) and exact.value == pytest.approx(1) and not exact.at_edge
    assert exact.low < best < exact.high  # type: ignore[operator]


def test_the_interval_of_the_optimum_is_that_of_fieller() -> None:
    """At its ends the slope of the parabola is as far from 0 as its standard error times t, by numpy's own fit and scipy's own t."""
    random, rates = np.random.default_rng(4), 0.004 * 2.0 ** np.arange(-2, 3)
    values = 0.05 * np.log2(rates / 0.005) ** 2 + random.normal(size=5) * 0.01
    found = fit_parabola(rates, values, Noise(0.02, 8), 3)
    x = np.log2(rates)
    (a, b, _), design = np.polyfit(x, values, 2), np.stack([x**2, x, np.ones(5)], axis=1)
    covariance = 0.02**2 / 3 * np.linalg.inv(design.T @ design)
    for end, side in ((found.low, -1), (found.high, 1)):
        assert end is not None
        at = np.array([2 * np.log2(end), 1, 0])
        assert (at @ [a, b, 0]) / math.sqrt(at @ covariance @ at) == pytest.approx(side * stats.t.ppf(0.975, 8), rel=1e-6)


def test_the_wavering_is_that_of_the_last_points_and_two_seeds_have_noise() -> None:
    some = curves(spread=0.5, over_seeds=0.02, wavering=0.01)
    some[:, :, :-5] += 7 * np.arange(7) ** 2
    last = quality(some[:, :, -5:], lower_is_better=True, is_paired=False).signal_to_checkpoints
    assert quality(some, lower_is_better=True, is_paired=False).signal_to_checkpoints == pytest.approx(last)
    two = quality(some[:, :2], lower_is_better=True, is_paired=False)
    assert two.signal_to_noise is not None and two.signal_to_noise > 1


@pytest.mark.parametrize("sd", [1e-12, 1e-9, 1e-6])
def test_an_optimum_of_arms_with_hardly_any_noise_has_an_interval(sd: float) -> None:
    """Its width is that of its noise: sd / (2 a) times what the design makes of it, whatever the place of the optimum."""
    rates = np.array([0.0025, 0.005, 0.01, 0.02, 0.04])
    widths = []
    for best in np.linspace(0.008, 0.0125, 19):
        found = fit_parabola(rates, 2 + 0.1 * np.log2(rates / best) ** 2, Noise(sd, 8), 3)
        assert found.low is not None and found.high is not None and found.low <= best * (1 + 1e-12) and best * (1 - 1e-12) <= found.high
        widths.append(np.log2(found.high / found.low) / sd)
    if sd > 1e-10:  # below, the rounding of the values is part of the noise
        assert max(widths) < 2 * min(widths) and 2 < min(widths) < 20


def test_an_optimum_at_the_edge_and_one_in_the_noise() -> None:
    rates = np.array([0.001, 0.002, 0.004])
    assert fit_parabola(rates, np.array([3.0, 2.0, 1.0]), Noise(0.01, 8), 3).at_edge
    flat = fit_parabola(rates, np.array([1.0, 0.999, 1.0005]), Noise(0.1, 8), 3)
    assert (flat.low, flat.high) == (None, None)
    assert fit_parabola(rates, np.array([1.0, 2.0, 1.0]), Noise(0.01, 8), 3).best is None


def test_the_critical_batch_is_the_largest_before_the_first_that_costs_more(tmp_path: Path) -> None:
    """Sizes 256 to 2,048 of which one or two cost more than 0.01 nats; a larger one that is cheap again does not count."""
    (tmp_path / "noise_scale.json").write_text('{"tokens": 700.0}')
    loss = SimpleNamespace(name="validation/loss")

    def conclusion(rises: list[float], diverged: tuple[int, ...] = ()) -> dict[str, Any]:
        arms = [SimpleNamespace(label=256.0 * 2**number, branch=SimpleNamespace(checkpoint=tmp_path)) for number in range(4)]
        complete = [arm for number, arm in enumerate(arms) if number not in diverged]
        known = SimpleNamespace(
            experiment=SimpleNamespace(measures=[loss], baseline=arms[0], arms=dict(enumerate(arms)), out=tmp_path),
            complete=lambda measure: (complete, [1, 2]), has_diverged=lambda arm: arm not in complete,
            table=lambda measure, arms, seeds: np.array([[3.0 + rise - 0.001, 3.0 + rise + 0.001] for rise in rises]),
        )  # fmt: skip
        found = conclusions.Findings(cast(Any, known)).critical_batch("validation/loss", 0.01)
        assert found is not None
        return found

    found = conclusion([0.0, 0.005, 0.012, 0.004])
    assert (found["critical"], found["beyond"]) == (512, 1024)
    assert "critical batch 512 tokens" in found["text"] and "scale 700 tokens" in found["text"]
    assert found["points"] == [[256, 0], [512, pytest.approx(0.005)], [1024, pytest.approx(0.012)], [2048, pytest.approx(0.004)]]
    assert conclusion([0.0, 0.02, 0.03, 0.04])["critical"] == 256
    whole = conclusion([0.0, -0.001, 0.001, 0.009])
    assert (whole["critical"], whole["beyond"]) == (2048, None) and "critical batch at least 2,048 tokens" in whole["text"]
    lost = conclusion([0.0, 0.001, 0.002], diverged=(3,))
    assert (lost["critical"], lost["beyond"]) == (1024, 2048) and "at least" not in lost["text"]
    assert conclusion([0.0, 0.001, 0.03], diverged=(3,))["beyond"] == 1024


def test_the_gradient_noise_scale_of_known_gradients() -> None:
    """Gradients of tokens drawn with a known mean and covariance: tr(S) / |G|^2 = 500."""
    random, dimensions, small, large = np.random.default_rng(3), 50, 64, 512
    true = random.normal(size=dimensions)
    true *= np.sqrt(dimensions / 500) / np.linalg.norm(true)  # each component of a token's gradient has variance 1
    noise = random.normal(size=(400, large // small, dimensions)) / np.sqrt(small)
    batches = true + noise
    found = from_norms((batches**2).sum(axis=2).ravel(), (batches.mean(axis=1) ** 2).sum(axis=1), small, large)
    assert found.tokens == pytest.approx(500, rel=0.15)
    assert from_norms(np.array([4.0]), np.array([0.1]), 64, 512).tokens is None


def test_the_gradient_noise_scale_of_a_checkpoint(finished: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of single sequences of the last phase, each with the mean of its own tokens; large batches are their means."""
    monkeypatch.setattr(conclusions, "_LARGE", 2)
    monkeypatch.setattr(conclusions, "_SMALL_PER_LARGE", 3)
    recipe, checkpoint = load_recipe(finished.recipe).recipe, listing.directories(finished.run_dir / "checkpoints")[-1]
    given: list[tuple[np.ndarray, ...]] = []
    monkeypatch.setattr(conclusions, "from_norms", lambda *norms: (given.append(norms), from_norms(*norms))[1])
    found = measure_noise_scale(recipe, finished.run_dir, checkpoint)
    model = load_checkpoint(find_weights(checkpoint), torch.float32, torch.device("cpu")).train()
    rows = []
    curriculum = PretrainingCurriculum(recipe, Batches(recipe, finished.run_dir / "shards"))
    phase, count = curriculum.phase(curriculum.steps - 1), curriculum.sequences(curriculum.steps - 1)
    for place in range(6):
        batch = curriculum.batch(phase.first_step + place // count, place % count, place % count + 1)
        tokens, labels, starts = (torch.from_numpy(one).long() for one in (batch.tokens, batch.labels, batch.cu_seqlens))
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens, starts.int()).flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
        rows.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    small = [float(row.square().sum()) for row in rows]
    large = [float(torch.stack(three).mean(0).square().sum()) for three in (rows[:3], rows[3:])]
    ((mine, means, length, tokens),) = given
    assert (length, tokens) == (64, 192) and (found.small, found.large, found.batches) == (64, 192, 2)
    # the router's loss is part of them and not of the logits
    assert mine == pytest.approx(np.array(small), rel=2e-3) and means == pytest.approx(np.array(large), rel=2e-3)


def test_noise_around_lines_leaves_out_what_a_line_explains() -> None:
    """Of the residuals 1, -1, -1, 1 no line explains a part; each curve has two degrees of freedom."""
    steps, residuals = np.arange(4), np.array([1.0, -1.0, -1.0, 1.0])
    curves = np.array([[3 - 2 * steps + residuals, 7 + 5 * steps - residuals]])
    assert _around_lines(curves) == pytest.approx(math.sqrt(8 / (2 * 2)))
    assert _around_lines(curves - np.array([[residuals, -residuals]])) == pytest.approx(0, abs=1e-9)


def test_why_no_minimum_was_found() -> None:
    rates = 0.0025 * 2.0 ** np.arange(5)
    beyond = fit_parabola(rates, 0.1 * np.log2(rates / 0.2) ** 2, Noise(0.002, 6), 3)  # more than an octave above the last one
    assert beyond.best is None and beyond.upward
    assert "has its lowest point more than an octave beyond the arms that it was fitted to; the lowest" in _optimum_text("x", beyond, None)
    falling = fit_parabola(rates, -0.1 * np.log2(rates / 0.0001) ** 2, Noise(0.002, 6), 3)
    assert falling.best is None and not falling.upward and "does not open upward" in _optimum_text("x", falling, None)
