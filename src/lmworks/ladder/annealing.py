"""The annealing law: the loss after s steps as a function of the learning-rate schedule (Tissue et al., arXiv:2408.11029).

    L(s) = L0 + A S1(s)^-alpha - C S2(s)

S1 is the sum of the learning rates of the first s steps. S2, the annealing area, is the sum over these steps of a momentum
m_i = lambda m_(i-1) + eta_(i-1) - eta_i, by which a decay of the learning rate lowers the loss with some delay. Learning rates are
fractions of the peak. S1 counts the warm-up, S2 does not: its increase of the learning rate is no annealing in reverse.

The objective is the Huber loss of the residuals of log L, minimized by L-BFGS from several starts for each lambda of a grid. S2 is computed
once for each of them, so the cost of a fit depends on the number of validations and not on that of steps.

A short decay hardly determines lambda, and a longer one may then be worth much more or much less than the best fit says. So lambda is drawn
from the likelihood of the best fit for each, and the other parameters come from a parametric bootstrap for the lambda that was drawn.
Residuals of neighboring validations are alike, since a curve bends otherwise than its law: the noise that is drawn has their
autocorrelation, and the likelihood counts as many validations as are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from lmworks.ladder.fit import BOOTSTRAPS, HUBER

PARAMETERS = 5  # L0, A, alpha, C, lambda
LEVEL = 0.9  # of the prediction interval
_GRID = 48  # values of lambda
_STRIDE = 8  # of the grid, for which all starts are tried
_SHORTEST = 2.0  # steps, of 1 / (1 - lambda)
_MOST_CORRELATED = 0.95
_NOISE_FREEDOM = 2.0  # degrees of freedom that few or highly correlated validations have at least
_LOWEST = 1e-6  # of a predicted loss, so that its logarithm exists
_LEAST_NOISE = 1e-7  # of log loss, so that the likelihood of a perfect fit exists
_BOUNDS = ((-12.0, 5.0), (-12.0, 5.0), (0.05, 2.0), (-14.0, 3.0))


@dataclass(frozen=True)
class Areas:
    """S1 after some numbers of steps, and S2 for each lambda of a grid: (points, grid)."""

    forward: np.ndarray
    annealing: np.ndarray

    @classmethod
    def of(cls, lr_factors: np.ndarray, after_warmup: int, steps: np.ndarray, decays: np.ndarray) -> Areas:
        """`lr_factors` are the learning rates of all steps as fractions of the peak, `after_warmup` is the first step after the warm-up,
        `steps` are the numbers of steps to evaluate at, at least 1, and `decays` is the grid of lambda."""
        from scipy.signal import lfilter

        falls = np.zeros_like(lr_factors)
        falls[after_warmup + 1 :] = lr_factors[after_warmup:-1] - lr_factors[after_warmup + 1 :]
        annealing = np.empty((len(steps), len(decays)))
        for column, decay in enumerate(decays):
            momentum = lfilter([1.0], [1.0, -decay], falls)
            annealing[:, column] = np.cumsum(momentum)[steps - 1]
        return cls(np.cumsum(lr_factors)[steps - 1], annealing)


@dataclass(frozen=True)
class Parameters:
    """One fit; lambda is the value of the grid at `index`."""

    l0: float
    a: float
    alpha: float
    c: float
    index: int

    def loss(self, areas: Areas) -> np.ndarray:
        return np.asarray(self.l0 + self.a * areas.forward**-self.alpha - self.c * areas.annealing[:, self.index])


@dataclass(frozen=True)
class AnnealingLaw:
    """A fitted law. `correlation` is that of the residuals of neighboring validations; each bootstrap fit has the standard deviation of
    the noise that it was drawn with, in log loss."""

    best: Parameters
    decays: np.ndarray
    correlation: float
    samples: tuple[tuple[Parameters, float], ...]

    def loss(self, areas: Areas) -> np.ndarray:
        return self.best.loss(areas)

    def interval(self, areas: Areas, level: float = LEVEL) -> tuple[np.ndarray, np.ndarray]:
        """Prediction interval of measured losses: the spread of the bootstrap fits, and of measurements around the law."""
        fits = np.stack([parameters.loss(areas) for parameters, _ in self.samples])
        noise = np.array([noise for _, noise in self.samples])
        drawn = np.exp(noise * np.random.default_rng(0).standard_normal((64, len(noise))))
        ends = [np.quantile(column * drawn, [(1 - level) / 2, (1 + level) / 2]) for column in fits.T]  # point by point, to bound memory
        low, high = np.array(ends).reshape(-1, 2).T
        return low, high

    @property
    def decay(self) -> float:
        """Lambda."""
        return float(self.decays[self.best.index])

    def decay_interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Interval of lambda."""
        low, high = np.quantile([parameters.index for parameters, _ in self.samples], [(1 - level) / 2, (1 + level) / 2])
        return float(self.decays[int(low)]), float(self.decays[int(np.ceil(high))])


def grid_of_decays(longest: int) -> np.ndarray:
    """Values of lambda, in ascending order, for runs of at most `longest` steps."""
    return np.asarray(1 - 1 / np.geomspace(_SHORTEST, max(2 * _SHORTEST, longest), _GRID))


def fit_annealing(
    areas: Sequence[Areas], losses: Sequence[np.ndarray], decays: np.ndarray, *, bootstraps: int = BOOTSTRAPS, seed: int = 0,
    advance: Callable[[int], None] | None = None,
) -> AnnealingLaw:  # fmt: skip
    """The law of these runs, each with the areas and losses of its validations in their order."""
    whole = Areas(np.concatenate([one.forward for one in areas]), np.concatenate([one.annealing for one in areas]))
    log_loss, lengths = np.log(np.concatenate(losses)), [len(loss) for loss in losses]
    fits = [_Fit(whole, index) for index in range(len(decays))]
    found = _fit_each(fits, log_loss)
    thetas = [theta for _, theta in found]
    best = int(np.argmin([value for value, _ in found]))
    fitted = np.stack([np.log(fit.predict(theta)[0]) for fit, theta in zip(fits, thetas, strict=True)])
    correlation = _correlation(np.split(log_loss - fitted[best], np.cumsum(lengths)[:-1]))
    # As many independent residuals as say equally much about their mean.
    effective = len(log_loss) * (1 - correlation) / (1 + correlation)
    freedom = max(_NOISE_FREEDOM, effective - PARAMETERS)
    spread = np.maximum(np.sqrt(((log_loss - fitted) ** 2).mean(1)), _LEAST_NOISE)
    likelihood = (spread.min() / spread) ** effective
    noise = float(spread[best] * np.sqrt((freedom + PARAMETERS) / freedom))
    random = np.random.default_rng(seed)
    samples = []
    for index in random.choice(len(decays), bootstraps, p=likelihood / likelihood.sum()):
        drawn = float(noise * np.sqrt(freedom / random.chisquare(freedom)))
        noisy = fitted[index] + drawn * np.concatenate([_autoregressive(random, length, correlation) for length in lengths])
        samples.append((fits[index].parameters(fits[index].minimize(noisy, thetas[index])[1]), drawn))
        if advance:
            advance(1)
    return AnnealingLaw(fits[best].parameters(thetas[best]), decays, correlation, tuple(samples))


def _fit_each(fits: Sequence[_Fit], log_loss: np.ndarray) -> list[tuple[float, np.ndarray]]:
    """The best value and theta for each lambda: from all starts for some, from the nearest of these for the others."""
    found = {}
    for index in range(_STRIDE // 2, len(fits), _STRIDE):
        found[index] = min((fits[index].minimize(log_loss, start) for start in _starts(log_loss)), key=lambda one: one[0])
    known = list(found)
    for index in set(range(len(fits))) - set(known):
        found[index] = fits[index].minimize(log_loss, found[min(known, key=lambda one: abs(one - index))][1])
    return [found[index] for index in range(len(fits))]


class _Fit:
    """Fits for one lambda by theta = (log L0, log of the second term at the mean of log S1, alpha, log of the largest third term), in which
    the parameters depend little on each other."""

    def __init__(self, areas: Areas, index: int) -> None:
        log_forward = np.log(areas.forward)
        self._index, self._center = index, float(log_forward.mean())
        self._distance = log_forward - self._center
        self._largest = max(float(np.abs(areas.annealing[:, index]).max()), 1e-12)
        self._annealing = areas.annealing[:, index] / self._largest

    def parameters(self, theta: np.ndarray) -> Parameters:
        l0, a, alpha, c = (float(value) for value in theta)
        return Parameters(float(np.exp(l0)), float(np.exp(a + alpha * self._center)), alpha, float(np.exp(c)) / self._largest, self._index)

    def predict(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The losses, and their derivatives by theta: (4, points)."""
        l0, a, alpha, c = theta
        power = np.exp(a - alpha * self._distance)
        derivatives = np.stack([np.full_like(power, np.exp(l0)), power, -self._distance * power, -np.exp(c) * self._annealing])
        return np.maximum(derivatives[0] + power + derivatives[3], _LOWEST), derivatives

    def minimize(self, log_loss: np.ndarray, start: np.ndarray) -> tuple[float, np.ndarray]:
        from scipy.optimize import minimize

        def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
            whole, derivatives = self.predict(theta)
            residual = np.log(whole) - log_loss
            inside = np.abs(residual) <= HUBER
            value = np.where(inside, residual**2 / 2, HUBER * (np.abs(residual) - HUBER / 2)).sum()
            return float(value) / HUBER**2, derivatives @ (np.clip(residual, -HUBER, HUBER) / whole) / HUBER**2

        options = {"maxiter": 300, "ftol": 1e-11}
        found = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=_BOUNDS, options=options)
        return float(found.fun), found.x


def _starts(log_loss: np.ndarray) -> list[np.ndarray]:
    lowest, mean = float(np.exp(log_loss.min())), float(np.exp(log_loss.mean()))
    return [
        np.array([np.log(share * lowest), np.log(mean - share * lowest), alpha, np.log(0.05 * lowest)])
        for share, alpha in product((0.3, 0.8), (0.2, 0.6))
    ]


def _correlation(residuals: Sequence[np.ndarray]) -> float:
    """Of neighboring residuals, within runs. That of a few residuals of a fit is too low on average; a degree of freedom is lost to each
    parameter."""
    square = sum(float(one @ one) for one in residuals)
    product_ = sum(float(one[1:] @ one[:-1]) for one in residuals)
    count = sum(map(len, residuals))
    return float(np.clip(product_ / square + PARAMETERS / count if square else 0.0, 0.0, _MOST_CORRELATED))


def _autoregressive(random: np.random.Generator, length: int, correlation: float) -> np.ndarray:
    """Standard normal noise with this correlation of neighbors."""
    noise = random.standard_normal(length)
    noise[1:] *= np.sqrt(1 - correlation**2)
    for index in range(1, length):
        noise[index] += correlation * noise[index - 1]
    return noise
