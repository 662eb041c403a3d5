"""The best learning rate of a sweep: a parabola in the logarithm of the rate, with an interval of its lowest point.

Least squares of y = a x^2 + b x + c over the arm means, x = log2(rate). The lowest point is -b / 2a. Its interval holds every x at which
the slope 2 a x + b is not shown to differ from 0 (Fieller 1954), so it is unbounded where the curvature is not shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lmworks.ablate.statistics.noise import Noise
from lmworks.ablate.statistics.student import t_critical

_ALPHA = 0.05
_REACH = 1.0  # octaves beyond the fitted rates in which a lowest point is believed
_WIDTH = 2.0  # octaves around the lowest arm that the parabola is fitted to: farther away, losses are no parabola


@dataclass(frozen=True)
class Optimum:
    """The rate with the lowest value. `low` and `high` bound it with 95% confidence; None where unbounded. `at_edge`: the lowest arm is the
    first or the last. `best` is None where no minimum was found."""

    best: float | None
    low: float | None
    high: float | None
    at_edge: bool
    fitted: tuple[float, ...]
    value: float | None = None


def fit(rates: np.ndarray, values: np.ndarray, noise: Noise, seeds: int) -> Optimum:
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
    if not df:
        return Optimum(best, None, None, at_edge, fitted, value)
    covariance = variance * np.linalg.inv(design.T @ design)
    t2 = t_critical(_ALPHA, df) ** 2
    # (2 a x + b)^2 <= t^2 (4 x^2 Vaa + 4 x Vab + Vbb), a quadratic inequality in x
    square = 4 * (a * a - t2 * covariance[0, 0])
    linear = 4 * (a * b - t2 * covariance[0, 1])
    constant = b * b - t2 * covariance[1, 1]
    inside = linear * linear - 4 * square * constant
    if a <= 0 or square <= 0 or inside < 0:
        return Optimum(best, None, None, at_edge, fitted, value)
    half = math.sqrt(inside)
    low, high = (float(2 ** (center + (-linear + side * half) / (2 * square))) for side in (-1, 1))
    return Optimum(best, low, high, at_edge, fitted, value)
