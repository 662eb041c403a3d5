"""Fits L(N, D) = E + (A / N^alpha + B / D^beta)^gamma to measured losses.

gamma = 1 is the law of Hoffmann et al. (arXiv:2203.15556). Small models in the first part of training are nearer to that of Kaplan et
al. (arXiv:2001.08361), where E = 0: a larger model learns more from the same additional tokens, and what no model can learn is not in sight
yet. Few runs determine E and gamma together, but not each, which widens the intervals.

The objective is that of Hoffmann et al.: the Huber loss of the residuals of log L, minimized by L-BFGS from a grid of starts. Intervals
come from a parametric bootstrap: the residual standard deviation is drawn from its own distribution (scaled inverse chi-squared with n - 6
degrees of freedom, so that few runs give wide intervals), losses are drawn around the fit, and the law is fitted again.

What the runs leave open must be open in the bootstrap fits too. Each of them has a weak prior with a center of its own, drawn from the
same prior: the share of the size in the middle of the runs, the ratio and the mean of the exponents, and gamma. Where the runs determine
the law, it weighs nothing. Where they do not (all runs with 20 tokens per parameter), the fits spread as far as laws may differ (randomized
maximum likelihood, Oliver et al. 1996), and so do the intervals.

Runs of one size and one seed have initial weights and the order of the data in common, and those of a ladder the trunk, so part of their
noise is common to them. It is seen where a size has several seeds, and estimated and drawn for itself (a random effect of size and seed,
by the analysis of variance).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from lmworks.errors import UserError
from lmworks.ladder.design import Design, Point, judge, require_rank
from lmworks.plan.laws import FittedTo, LossLaw
from lmworks.recipe.scaling_laws import EPOCHS_AS_NEW

PARAMETERS = 6  # of the law
HUBER = 1e-3  # of log loss; larger residuals count linearly
BOOTSTRAPS = 200
_DESCRIBED = 0.005  # root mean square of the residuals of log loss above which the law does not describe the runs
_MEDIAN = 1.25  # sqrt(pi / 2): where the loss is linear, runs weigh as in a median, which has pi / 2 times the variance of a mean
_QUIET = 1e-4  # of log loss: the least noise that runs are taken to have beside the prior
_NOISE_FREEDOM = 2  # degrees of freedom that a ladder with few runs has at least, so that the noise is finite
# The prior: the logit of the share of the size in the inner sum, log(alpha / beta), the log of gamma sqrt(alpha beta), and log gamma.
# In print: ratios of 0.8 to 1.05, slopes of 0.08 to 0.35, and gamma of 1 (Hoffmann), at which half of the draws are, or of 0.1 (Kaplan).
_MEANS, _DEVIATIONS = np.array([0.0, 0.0, np.log(0.25), 0.0]), np.array([1.5, 0.4, 0.5, 0.7])
# of E, log A and log B in the middle of the runs, alpha, beta, log gamma; E is not in logarithm, which would never leave 0
_BOUNDS = ((0.0, 100.0), (-40.0, 40.0), (-40.0, 40.0), (0.05, 3.0), (0.05, 3.0), (-3.0, 0.0))


def fit_law(
    points: Sequence[Point], unit: str, source: str, *, bootstraps: int = BOOTSTRAPS, seed: int = 0,
    advance: Callable[[int], None] | None = None,
) -> LossLaw:  # fmt: skip
    """The law of these runs, with bootstrap fits. Raises `UserError` if the runs do not determine one."""
    _require_enough(points)
    size, tokens, loss = (np.array([getattr(one, name) for one in points], np.float64) for name in ("parameters", "tokens", "loss"))
    best = min((_minimize(size, tokens, loss, start) for start in _starts(size, tokens, loss)), key=lambda found: found[0])[1]
    noise = _Noise.of(np.log(loss) - np.log(_predict(best, size, tokens)), points)
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(bootstraps):
        own, common = noise.draw(random)
        drawn = own * random.standard_normal(len(points)) + common * random.standard_normal(noise.pairs.max() + 1)[noise.pairs]
        prior = _Prior.drawn(random, size, tokens, max(_QUIET, float(np.hypot(own, common))))
        target = _predict(best, size, tokens) * np.exp(drawn)
        starts = best, prior.tilted(best)
        e, a, b, alpha, beta, gamma = _law(min((_minimize(size, tokens, target, start, prior) for start in starts), key=_value)[1])
        samples.append((e, a, b, alpha, beta, float(np.hypot(own, common)), gamma))
        if advance:
            advance(1)
    e, a, b, alpha, beta, gamma = _law(best)
    sizes, budgets = (float(size.min()), float(size.max())), (float(tokens.min()), float(tokens.max()))
    fitted = FittedTo(sizes, budgets, float(6 * (size * tokens).max()))
    law = LossLaw(e, a, b, alpha, beta, unit, source, tuple(samples), gamma=gamma, fitted_to=fitted)
    return replace(law, undetermined="; nor ".join(design_of(law, points).untold))


def design_of(law: LossLaw, points: Sequence[Point]) -> Design:
    """What these runs determine, of which `law` is the fit."""
    return judge(law, points, float(np.hypot(*noise_of(law, points))))


def _value(found: tuple[float, np.ndarray]) -> float:
    return found[0]


@dataclass(frozen=True)
class _Prior:
    """What is thought of the law before the runs, as four features of its parameters at log size `size` and log tokens `tokens`, drawn
    around `_MEANS`. `weight` is that of a squared deviation beside the objective."""

    size: float
    tokens: float
    center: np.ndarray
    weight: float

    @classmethod
    def drawn(cls, random: np.random.Generator, size: np.ndarray, tokens: np.ndarray, noise: float) -> _Prior:
        center = _MEANS + _DEVIATIONS * random.standard_normal(len(_MEANS))
        center[3] = np.clip(center[3], *_BOUNDS[5])
        weight = min((noise / HUBER) ** 2, _MEDIAN * noise / HUBER)  # what a squared deviation of one run weighs, in units of the noise
        return cls(float(np.log(size).mean()), float(np.log(tokens).mean()), center, weight)

    def tilted(self, theta: np.ndarray) -> np.ndarray:
        """A law with the same loss in the middle, and the features of the prior."""
        _, a, b, alpha, beta, log_gamma = theta
        reducible = np.exp(log_gamma) * np.logaddexp(a - alpha * self.size, b - beta * self.tokens)
        logit, ratio, slope, log_gamma = self.center
        alpha, beta = np.clip(np.exp(slope - log_gamma + np.array([ratio, -ratio]) / 2), *_BOUNDS[3])
        inner = reducible / np.exp(log_gamma)
        a, b = inner - np.logaddexp(0, -logit) + alpha * self.size, inner - np.logaddexp(0, logit) + beta * self.tokens
        return np.array([theta[0], a, b, alpha, beta, log_gamma])

    def penalty(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        _, a, b, alpha, beta, log_gamma = theta
        share, ratio = (a - alpha * self.size) - (b - beta * self.tokens), np.log(alpha / beta)
        slope = log_gamma + np.log(alpha * beta) / 2
        off = (np.array([share, ratio, slope, log_gamma]) - self.center) / _DEVIATIONS
        of_share, of_ratio, of_slope, of_gamma = self.weight * off / _DEVIATIONS
        gradient = np.array([
            0.0, of_share, -of_share, -self.size * of_share + (of_ratio + of_slope / 2) / alpha,
            self.tokens * of_share + (of_slope / 2 - of_ratio) / beta, of_slope + of_gamma,
        ])  # fmt: skip
        return float(self.weight / 2 * off @ off), gradient


@dataclass(frozen=True)
class _Noise:
    """The noise of log loss. `pairs` (runs,) numbers the pairs of size and seed; `size` is the mean number of runs of a pair. `between` is
    the mean square of what the means of pairs differ from that of their size, `own` that of all other residuals, each with its degrees
    of freedom."""

    pairs: np.ndarray
    size: float
    own: float
    own_freedom: int
    between: float
    between_freedom: int

    @classmethod
    def of(cls, residuals: np.ndarray, points: Sequence[Point]) -> _Noise:
        _, sizes = np.unique([one.parameters for one in points], return_inverse=True)
        names, pairs = np.unique([(one.parameters, one.seed) for one in points], axis=0, return_inverse=True)
        pairs = pairs.reshape(-1)
        if len(names) == len(points):  # every run has a seed of its own
            pairs, names = sizes, names[: sizes.max() + 1]
        means = (np.bincount(pairs, residuals) / np.bincount(pairs))[pairs] - (np.bincount(sizes, residuals) / np.bincount(sizes))[sizes]
        between, between_freedom = float((means**2).sum()), len(names) - int(sizes.max()) - 1
        freedom = max(_NOISE_FREEDOM, len(points) - PARAMETERS - between_freedom)
        own = (float((residuals**2).sum()) - between) / freedom
        return cls(pairs, len(points) / len(names), own, freedom, between / max(1, between_freedom), between_freedom)

    @property
    def standard_deviations(self) -> tuple[float, float]:
        """Estimates: of a run alone, and of what the runs of a pair have in common (0 with one seed, which does not show it)."""
        return self._deviations(self.own, self.between)

    def draw(self, random: np.random.Generator) -> tuple[float, float]:
        """`standard_deviations`, each drawn from its own distribution."""
        own = self.own * self.own_freedom / random.chisquare(self.own_freedom)
        if self.between_freedom == 0:
            return self._deviations(own, 0.0)
        return self._deviations(own, self.between * self.between_freedom / random.chisquare(self.between_freedom))

    def _deviations(self, own: float, between: float) -> tuple[float, float]:
        return float(np.sqrt(own)), float(np.sqrt(max(0.0, between - own) / self.size))


def residual(law: LossLaw, points: Sequence[Point]) -> float:
    """Root mean square of the residuals of log loss."""
    return float(np.sqrt(np.mean(_residuals(law, points) ** 2)))


def noise_of(law: LossLaw, points: Sequence[Point]) -> tuple[float, float]:
    """Standard deviations of log loss: of a run alone, and of what the runs of one size and seed have in common (0 with one seed)."""
    return _Noise.of(_residuals(law, points), points).standard_deviations


def _residuals(law: LossLaw, points: Sequence[Point]) -> np.ndarray:
    return np.log([one.loss / law.loss(one.parameters, one.tokens) for one in points])


def doubts(law: LossLaw, points: Sequence[Point]) -> list[str]:
    """Why predictions of the law may be wrong by more than their intervals, which assume that it holds."""
    found = design_of(law, points).doubts
    if (missed := residual(law, points)) > _DESCRIBED:
        found.append(
            f"the law describes these runs only to within {missed:.1%}, so predictions can miss by more than their intervals: look at the "
            "residuals; it does not hold in the first part of training, so leave out the runs with the fewest tokens, or train for longer"
        )
    if repeated := [one.epochs for one in points if one.epochs > EPOCHS_AS_NEW]:
        found.append(
            f"{len(repeated)} of {len(points)} runs read a source more than {EPOCHS_AS_NEW} times (up to {max(repeated):,.0f}), beyond "
            "which repeated text is worth less than new text (arXiv:2305.16264), and the law does not tell them apart: add text, or lower "
            "tokens"
        )
    if len({(one.parameters, one.seed) for one in points}) == len({one.parameters for one in points}):
        found.append(
            "each size has one seed, so the runs do not show how much their loss depends on it, and the intervals leave that out; add a "
            "second one (seeds: 2)"
        )
    for name, exponent, of in (("alpha", law.alpha, "size"), ("beta", law.beta, "number of tokens")):
        if not _BOUNDS[3][0] * 1.01 < exponent < _BOUNDS[3][1] * 0.99:
            found.append(f"{name} is at its limit: these runs do not show how the loss depends on the {of}; add values that differ more")
    return found


def _require_enough(points: Sequence[Point]) -> None:
    sizes, horizons = ({getattr(one, name) for one in points} for name in ("parameters", "tokens"))
    if len(points) <= PARAMETERS:
        raise UserError(
            f"{len(points)} {'run does' if len(points) == 1 else 'runs do'} not determine a law of {PARAMETERS} parameters: name at least "
            f"{PARAMETERS + 1} finished runs, of at least 3 sizes and 3 token budgets; `lmworks ladder run` trains them (docs/sizing.md)"
        )
    if len(sizes) < 3 or len(horizons) < 3:
        raise UserError(f"a law needs at least 3 sizes and 3 token budgets, and the runs have {len(sizes)} and {len(horizons)}; add some")
    require_rank(points, PARAMETERS)
    if not all(np.isfinite([one.parameters, one.tokens, one.loss]).all() and one.loss > 0 for one in points):
        raise UserError("a run of the ladder has no finite loss; remove it, or run it again with a lower learning rate")


def _predict(theta: np.ndarray, size: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    e, a, b, alpha, beta, gamma = _law(theta)
    return np.asarray(e + (a / size**alpha + b / tokens**beta) ** gamma)


def _law(theta: np.ndarray) -> tuple[float, float, float, float, float, float]:
    a, b, gamma = (float(value) for value in np.exp(theta[[1, 2, 5]]))
    return float(theta[0]), a, b, float(theta[3]), float(theta[4]), gamma


def _starts(size: np.ndarray, tokens: np.ndarray, loss: np.ndarray) -> list[np.ndarray]:
    """Laws whose two terms are equal in the middle of the runs."""
    n, d, lowest, middle = np.log(size).mean(), np.log(tokens).mean(), loss.min(), float(np.exp(np.log(loss).mean()))
    found = []
    for share, gamma, exponent in product((0.01, 0.4, 0.8), (0.15, 0.4, 0.999), (0.1, 0.3)):
        inner, slope = np.log(middle - share * lowest) / gamma - np.log(2), exponent / gamma
        found.append(np.array([share * lowest, inner + slope * n, inner + slope * d, slope, slope, np.log(gamma)]))
    return found


def _minimize(
    size: np.ndarray, tokens: np.ndarray, loss: np.ndarray, start: np.ndarray, prior: _Prior | None = None
) -> tuple[float, np.ndarray]:
    from scipy.optimize import minimize

    log_size, log_tokens, log_loss = np.log(size), np.log(tokens), np.log(loss)
    # The terms in the middle of the runs hardly depend on the exponents, so that a minimizer makes way along flat valleys.
    middle = np.zeros((6, 6))
    middle[1, 3], middle[2, 4] = log_size.mean(), log_tokens.mean()

    def objective(centered: np.ndarray) -> tuple[float, np.ndarray]:
        theta = centered + middle @ centered
        irreducible, a, b, alpha, beta, log_gamma = theta
        gamma = np.exp(log_gamma)
        of_size, of_tokens = np.exp(a - alpha * log_size), np.exp(b - beta * log_tokens)
        inner = of_size + of_tokens
        reducible = inner**gamma
        residual = np.log(irreducible + reducible) - log_loss
        inside = np.abs(residual) <= HUBER
        value = np.where(inside, residual**2 / 2, HUBER * (np.abs(residual) - HUBER / 2)).sum()
        slope = np.clip(residual, -HUBER, HUBER) / (irreducible + reducible)
        of_size, of_tokens = (gamma * reducible / inner * part for part in (of_size, of_tokens))
        gradient = np.array([
            slope.sum(), slope @ of_size, slope @ of_tokens, -(slope * log_size) @ of_size, -(slope * log_tokens) @ of_tokens,
            slope @ (gamma * reducible * np.log(inner)),
        ])  # fmt: skip
        of_prior, slope_of_prior = prior.penalty(theta) if prior else (0.0, 0.0)
        gradient = gradient / HUBER**2 + slope_of_prior
        return float(value) / HUBER**2 + of_prior, gradient + middle.T @ gradient

    options = {"maxiter": 1000, "ftol": 1e-11}
    found = minimize(objective, start - middle @ start, jac=True, method="L-BFGS-B", bounds=_BOUNDS, options=options)
    return float(found.fun), found.x + middle @ found.x
