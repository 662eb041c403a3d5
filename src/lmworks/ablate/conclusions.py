"""Conclusions of some kinds of ablations beyond verdicts: the optimum of a sweep, and the critical batch size.

**Optimum.** A parabola in the logarithm of the learning rate: least squares of y = a x^2 + b x + c over the arm means, x = log2(rate). The
lowest point is -b / 2a. Its interval holds every x at which the slope 2 a x + b is not shown to differ from 0 (Fieller 1954), so it is
unbounded where the curvature is not shown.

**Gradient noise scale** of a checkpoint (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1). With |G_b|^2 and |G_B|^2 the squared
gradient norms of a small batch of b and a large one of B tokens,

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        the squared norm of the true gradient
    S     = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)    the trace of the covariance of a token's gradient
    S / |G|^2                                        the noise scale, in tokens

Both are unbiased. Means over several large batches are divided, because a ratio of single estimates is biased.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.ablate.contrast import Noise
from lmworks.ablate.measures import Measure
from lmworks.ablate.results import Results
from lmworks.ablate.run_set import Arm
from lmworks.ablate.runs import recipe_of
from lmworks.ablate.welch import t_critical
from lmworks.io.files import read_json, write_json
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.terminal import bar

_ALPHA = 0.05
_REACH = 1.0  # octaves beyond the fitted rates in which a lowest point is believed
_WIDTH = 2.0  # octaves around the lowest arm that the parabola is fitted to: farther away, losses are no parabola


@dataclass(frozen=True)
class Optimum:
    """The rate with the lowest value. `low` and `high` bound it with 95% confidence; None where unbounded. `at_edge`: the lowest arm is the
    first or the last. `best` is None where no minimum was found, as where the parabola does not open `upward`."""

    best: float | None
    low: float | None
    high: float | None
    at_edge: bool
    fitted: tuple[float, ...]
    value: float | None = None
    upward: bool = True


def fit_parabola(rates: np.ndarray, values: np.ndarray, noise: Noise, seeds: int) -> Optimum:
    """Fit the parabola to `values`, the mean of each arm over `seeds` seeds; lower is better. Needs three rates."""
    order = np.argsort(rates)
    x, y = np.log2(rates[order]), values[order]
    lowest = int(np.argmin(y))
    at_edge = lowest in (0, len(y) - 1)
    near = np.abs(x - x[lowest]) <= _WIDTH + 1e-9
    if near.sum() < 3:
        near = np.argsort(np.abs(x - x[lowest]))[:3]
    x, y = x[near], y[near]
    if len(x) < 3:
        return Optimum(None, None, None, at_edge, tuple(2**x))
    center = x.mean()
    design = np.stack([(x - center) ** 2, x - center, np.ones(len(x))], axis=1)
    coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
    a, b, c = (float(one) for one in coefficients)
    misfit, misfit_df = float(((design @ coefficients - y) ** 2).sum()), len(x) - 3
    variance, df = (noise.sd**2 / seeds, noise.df) if noise.df else (0.0, 0.0)
    if misfit_df and misfit / misfit_df > variance:  # the parabola misses the points by more than their noise
        variance, df = misfit / misfit_df, misfit_df
    fitted = tuple(float(one) for one in 2**x)
    lowest_x = center - b / (2 * a) if a > 0 else math.inf
    is_near = x[0] - _REACH <= lowest_x <= x[-1] + _REACH
    best, value = (float(2**lowest_x), c - b * b / (4 * a)) if is_near else (None, None)
    found = Optimum(best, None, None, at_edge, fitted, value, a > 0)
    if not df:
        return found
    covariance = variance * np.linalg.inv(design.T @ design)
    t2 = t_critical(_ALPHA, df) ** 2
    # (2 a x + b)^2 <= t^2 (4 x^2 Vaa + 4 x Vab + Vbb), a quadratic inequality in x
    square = 4 * (a * a - t2 * covariance[0, 0])
    linear = 4 * (a * b - t2 * covariance[0, 1])
    # linear^2 - 4 square (b^2 - t^2 Vbb) without a^2 b^2, which cancels: of arms with little noise nothing but rounding would be left
    spread = a * a * covariance[1, 1] - 2 * a * b * covariance[0, 1] + b * b * covariance[0, 0]
    inside = 16 * t2 * (spread - t2 * (covariance[0, 0] * covariance[1, 1] - covariance[0, 1] ** 2))
    if a <= 0 or square <= 0 or inside < 0:
        return found
    half = math.sqrt(inside)
    low, high = (float(2 ** (center + (-linear + side * half) / (2 * square))) for side in (-1, 1))
    return replace(found, low=low, high=high)


_LARGE, _SMALL_PER_LARGE = 8, 8


@dataclass(frozen=True)
class NoiseScale:
    """The noise scale in tokens, and what it was measured on. `tokens` is None where the true gradient cannot be told from 0."""

    tokens: float | None
    small: int
    large: int
    batches: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def from_norms(small: np.ndarray, large: np.ndarray, small_tokens: int, large_tokens: int) -> NoiseScale:
    """From squared gradient norms of small batches, and of large ones that are their means."""
    b, B = small_tokens, large_tokens
    squared = (B * large.mean() - b * small.mean()) / (B - b)
    trace = (small.mean() - large.mean()) / (1 / b - 1 / B)
    return NoiseScale(float(trace / squared) if squared > 0 and trace > 0 else None, b, B, len(large))


def measure_noise_scale(recipe: Recipe, run_dir: Path, checkpoint: Path) -> NoiseScale:
    """Measure the noise scale of `checkpoint` on batches of the last phase of `recipe`, whose shards lie in `run_dir`.

    A small batch is one sequence. The weights are not changed.
    """
    import torch

    from lmworks.checkpoint import state
    from lmworks.optim.clip import global_norm
    from lmworks.shards.batches import Batches
    from lmworks.train.build import build_model
    from lmworks.train.curriculum import PretrainingCurriculum

    batches = Batches(recipe, run_dir / "shards")
    curriculum = PretrainingCurriculum(recipe, batches)
    model = build_model(recipe)
    state.load(checkpoint, {"model": model.state_dict()})
    phase = curriculum.phase(curriculum.steps - 1)
    if phase.model is not None:
        model.configure(phase.model)
    model.train()
    small: list[float] = []
    large: list[float] = []
    parameters = list(model.parameters())
    count = curriculum.sequences(curriculum.steps - 1)
    available = (curriculum.steps - phase.first_step) * count
    with bar("gradient noise scale", _LARGE * _SMALL_PER_LARGE) as progress:
        for number in range(_LARGE):
            sums = [torch.zeros_like(parameter) for parameter in parameters]
            for index in range(_SMALL_PER_LARGE):
                drawn = (number * _SMALL_PER_LARGE + index) % available
                batch = curriculum.batch(phase.first_step + drawn // count, drawn % count, drawn % count + 1)
                for parameter in parameters:
                    parameter.grad = None
                model.forward_backward(batch, 1, 1, 1 / max(1, batch.valid_tokens), batch.valid_tokens / batch.tokens.size)
                gradients = [torch.zeros_like(one) if one.grad is None else one.grad.detach() for one in parameters]
                small.append(float(global_norm(gradients)) ** 2)
                torch._foreach_add_(sums, gradients, alpha=1 / _SMALL_PER_LARGE)
                progress.advance()
            large.append(float(global_norm(sums)) ** 2)
    length = phase.sequence_length
    found = from_norms(np.array(small), np.array(large), length, length * _SMALL_PER_LARGE)
    return found if found.tokens is None or math.isfinite(found.tokens) else NoiseScale(None, found.small, found.large, found.batches)


@dataclass(frozen=True)
class Findings:
    """What `Ablation.conclude` may ask of the results."""

    results: Results

    def _by_label(self, measure: Measure) -> tuple[np.ndarray, np.ndarray, list[int], list[Arm]]:
        """The numbers that the arms stand for, their mean values, the seeds and the arms."""
        arms, seeds = self.results.complete(measure)
        arms = [arm for arm in arms if arm.label is not None]
        means = self.results.table(measure, arms, seeds).mean(axis=1) if arms and seeds else np.empty(0)
        return np.array([arm.label for arm in arms], np.float64)[: len(means)], means, seeds, arms[: len(means)]

    def optimum(self, what: str) -> dict[str, Any] | None:
        """The best value of what the arms stand for, by the first measure in which lower is better."""
        measure = next((one for one in self.results.experiment.measures if one.better == "lower"), None)
        if measure is None:
            return None
        rates, means, seeds, arms = self._by_label(measure)
        if len(rates) < 3:
            return None
        found = fit_parabola(rates, means, self.results.floor(measure, arms, seeds, True)[0], len(seeds))
        lowest = float(rates[int(np.argmin(means))])
        beyond = [rate for rate in self._diverged() if rate > lowest] if lowest == max(rates) else []
        return {
            "title": f"Optimum of the {what}", "what": what, "measure": measure.name, "points": _points(rates, means),
            "text": _optimum_text(what, found, min(beyond, default=None)), **asdict(found),
        }  # fmt: skip

    def critical_batch(self, name: str, tolerance: float) -> dict[str, Any] | None:
        """The largest batch up to which the loss is within `tolerance` of the first, beside the gradient noise scale of the checkpoint."""
        experiment = self.results.experiment
        measure = next((one for one in experiment.measures if one.name == name), None)
        if measure is None or experiment.baseline.branch is None:
            return None
        sizes, means, _, arms = self._by_label(measure)
        if len(sizes) < 2 or experiment.baseline not in arms:
            return None
        rise = means - means[arms.index(experiment.baseline)]
        beyond = min([float(size) for size, one in zip(sizes, rise, strict=True) if one > tolerance] + self._diverged(), default=None)
        critical = max(float(size) for size in sizes if beyond is None or size < beyond)
        scale = self._noise_scale(experiment.baseline.branch.checkpoint)
        known = scale.get("tokens")
        least = "at least " if beyond is None else ""
        text = f"critical batch {least}{critical:,.0f} tokens (loss within {tolerance:g} nats per token of that of the first batch)"
        text += f"; gradient noise scale {f'{known:,.0f} tokens' if known else 'not bounded: the gradient is all noise'}"
        return {
            "title": "Critical batch size", "what": "batch size in tokens", "measure": name, "tolerance": tolerance, "critical": critical,
            "beyond": beyond, "points": _points(sizes, rise), "noise_scale": scale, "text": text,
        }  # fmt: skip

    def _diverged(self) -> list[float]:
        """The numbers that arms stand for which have diverged with all seeds."""
        arms = self.results.experiment.arms.values()
        return [float(arm.label) for arm in arms if arm.label is not None and self.results.has_diverged(arm)]

    def _noise_scale(self, checkpoint: Path) -> dict[str, Any]:
        """Measured once, on the data of the first finished run of the baseline."""
        experiment = self.results.experiment
        path = experiment.out / "noise_scale.json"
        if not path.exists():
            run = self.results.finished(experiment.baseline)[0]
            write_json(path, measure_noise_scale(recipe_of(run), run.directory, checkpoint).to_json())
        found: dict[str, Any] = read_json(path)
        return found


def _points(x: np.ndarray, y: np.ndarray) -> list[list[float]]:
    return [[float(one), float(other)] for one, other in zip(x, y, strict=True)]


def _optimum_text(what: str, found: Optimum, diverged: float | None) -> str:
    """`diverged`: the next value above the lowest arm, where the arm has diverged and no arm between them has not."""
    if found.best is None:
        why = "has its lowest point more than an octave beyond the arms that it was fitted to" if found.upward else "does not open upward"
        text = f"no minimum was found: the parabola in the {what} {why}"
    elif found.low is None or found.high is None:
        text = f"best {what} {found.best:.3g}, without an interval: the curvature is within the noise"
    else:
        text = f"best {what} {found.best:.3g}, 95% interval {found.low:.3g} to {found.high:.3g}"
    if diverged is not None:
        return f"{text}; the lowest arm is the last that has not diverged ({diverged:.3g} has), so add arms between the two"
    return text + ("; the lowest arm is at the edge of the sweep, so extend it there" if found.at_edge else "")
