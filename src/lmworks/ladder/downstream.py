"""Fits a downstream scaling law to each benchmark that all runs of a ladder have scored.

The objective is the Huber loss of the residuals in units of their binomial standard deviation. The runs of a ladder rarely show how high
a benchmark can rise, so the curve is fitted for several ceilings, denser near 1, and each bootstrap fit takes one of them at random,
weighted by its likelihood. Scores are drawn around that curve, with the binomial noise of the items and with the dispersion of the
residuals, which is drawn from its own distribution as the noise of the loss is (`fit.py`); slope and midpoint are then fitted again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from lmworks.ladder.design import BenchmarkScore, Point
from lmworks.ladder.fit import BOOTSTRAPS
from lmworks.plan.laws import DownstreamLaw, sigmoid_score

SIGNAL_LEVEL = 0.05  # of the permutation test
_CURVE = 2  # parameters that are fitted for each ceiling
_CEILINGS = 10
_HUBER = 1.345  # standard deviations: 95% efficiency under normal noise
_PERMUTATIONS = 4000
_NOISE_FREEDOM = 2  # degrees of freedom that few runs have at least
# Of slope and midpoint, the losses of the runs having mean 0 and range 1.
_BOUNDS = ((np.log(0.3), np.log(40)), (-5.0, 2.0))
_STARTS = [np.array([np.log(slope), midpoint]) for slope, midpoint in product((2.0, 8.0), (-1.5, -0.3))]


def split_benchmarks(points: Sequence[Point]) -> tuple[list[str], dict[str, str]]:
    """The benchmarks that all runs have scored on the same items; and the others, each with why it is left out."""
    fitted, left_out = [], {}
    for name in sorted({name for point in points for name in point.scores}):
        found = [point.scores[name] for point in points if name in point.scores]
        remedy = f"lmworks evaluate --follow RUN --tasks {name.partition('/')[0]}"
        if len(found) < len(points):
            left_out[name] = f"{len(found)} of {len(points)} runs have scored it behind their last step; score the others with: {remedy}"
        elif len({(one.items, one.chance) for one in found}) > 1:
            counts = sorted({one.items for one in found})
            left_out[name] = f"the runs have not scored it on the same items (of {counts[0]} to {counts[-1]}); score all with: {remedy}"
        elif found[0].chance == 1:
            left_out[name] = "blind guesses are always right, since every item has one choice; give its items wrong choices"
        else:
            fitted.append(name)
    return fitted, left_out


def fit_downstream(
    points: Sequence[Point], *, bootstraps: int = BOOTSTRAPS, seed: int = 0, advance: Callable[[int], None] | None = None
) -> tuple[DownstreamLaw, ...]:
    """The law of each benchmark that all runs have scored on the same items. `advance` is called with the bootstrap fits done."""
    loss = np.array([point.loss for point in points], np.float64)
    laws = []
    for name in split_benchmarks(points)[0]:
        laws.append(_fit_benchmark(name, loss, [point.scores[name] for point in points], bootstraps, seed, advance or (lambda count: None)))
    return tuple(laws)


def _fit_benchmark(
    name: str, loss: np.ndarray, scores: Sequence[BenchmarkScore], bootstraps: int, seed: int, advance: Callable[[int], None]
) -> DownstreamLaw:
    random = np.random.default_rng(seed)
    items, chance = scores[0].items, scores[0].chance
    score = np.array([one.score for one in scores], np.float64)
    center, width = float(loss.mean()), float(np.ptp(loss)) or 1.0
    x = (loss - center) / width
    mean = (score.sum() * items + 0.5) / (len(score) * items + 1)  # a half keeps the scale above 0
    scale = float(np.sqrt(mean * (1 - mean) / items))
    ceilings = 1 - (1 - chance) * (np.arange(_CEILINGS) / _CEILINGS) ** 2
    found = [min((_fit_curve(x, score, chance, 1.0, scale, start) for start in _STARTS), key=lambda one: one[0])]
    for ceiling in ceilings[1:]:
        found.append(_fit_curve(x, score, chance, ceiling, scale, found[-1][1]))
    values, curves = np.array([value for value, _ in found]), np.array([curve for _, curve in found])
    best = int(values.argmin())
    p_value = _permutation_test(x, score, random)
    signal = p_value < SIGNAL_LEVEL and bool(values[best] < _huber((score - score.mean()) / scale).sum())
    expected = _expected(x, chance, ceilings[best], curves[best])
    variance = max(float((expected * (1 - expected)).mean()) / items, scale**2 / len(score))
    freedom = max(_NOISE_FREEDOM, len(score) - _CURVE - 1)
    dispersion = float(((score - expected) ** 2).sum()) / freedom / variance
    weights = np.exp((values.min() - values) / max(1.0, dispersion))
    samples = []
    for _ in range(bootstraps):
        if signal:
            one = int(random.choice(_CEILINGS, p=weights / weights.sum()))
            excess = dispersion * freedom / random.chisquare(freedom) - 1  # over the binomial variance
            spread = float(np.sqrt(max(0.0, excess) * variance))
            of_runs = np.clip(_expected(x, chance, ceilings[one], curves[one]) + spread * random.standard_normal(len(x)), 0, 1)
            curve = _fit_curve(x, random.binomial(items, of_runs) / items, chance, ceilings[one], scale, curves[one])[1]
            samples.append((float(ceilings[one]), *_unscaled(curve, center, width), min(spread, 1.0)))
        advance(1)
    slope, midpoint = _unscaled(curves[best], center, width)
    return DownstreamLaw(name, chance, float(ceilings[best]), slope, midpoint, items, len(score), p_value, signal, tuple(samples))


def _expected(x: np.ndarray, chance: float, ceiling: float, curve: np.ndarray) -> np.ndarray:
    return sigmoid_score(x, chance, ceiling, float(np.exp(curve[0])), float(curve[1]))


def _unscaled(curve: np.ndarray, center: float, width: float) -> tuple[float, float]:
    """Slope and midpoint in the unit of the loss."""
    return float(np.exp(curve[0])) / width, center + width * float(curve[1])


def _huber(residual: np.ndarray) -> np.ndarray:
    return np.where(np.abs(residual) <= _HUBER, residual**2 / 2, _HUBER * (np.abs(residual) - _HUBER / 2))


def _fit_curve(
    x: np.ndarray, score: np.ndarray, chance: float, ceiling: float, scale: float, start: np.ndarray
) -> tuple[float, np.ndarray]:
    """Objective, and log slope and midpoint, of the best curve with this ceiling."""
    from scipy.optimize import minimize

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        slope, midpoint = float(np.exp(theta[0])), float(theta[1])
        rise = sigmoid_score(x, 0.0, 1.0, slope, midpoint)
        residual = (chance + (ceiling - chance) * rise - score) / scale
        inner = np.clip(residual, -_HUBER, _HUBER) / scale * (ceiling - chance) * rise * (1 - rise) * slope
        return float(_huber(residual).sum()), np.array([inner @ (midpoint - x), inner.sum()])

    found = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=_BOUNDS, options={"maxiter": 200, "ftol": 1e-8})
    return float(found.fun), found.x


def _permutation_test(x: np.ndarray, score: np.ndarray, random: np.random.Generator) -> float:
    """One-sided p-value of the hypothesis that the scores do not rise as the loss falls, by their covariance."""
    x = x - x.mean()
    shuffled = random.permuted(np.tile(score, (_PERMUTATIONS, 1)), axis=1) @ x
    return (1 + int((shuffled <= score @ x + 1e-12).sum())) / (1 + _PERMUTATIONS)
