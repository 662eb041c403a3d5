"""Student's t and F distributions, and the power of a t test, without scipy.

The tails follow from the regularized incomplete beta function, by its continued fraction (DLMF 8.17.22).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

_TINY, _PRECISION, _MOST_TERMS = 1e-300, 1e-15, 10_000
_HALVINGS = 100


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, the other tail is taken
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), _TINY)
    fraction = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):  # Lentz's method
            d = 1 / _not_zero(1 + term * d)
            c = _not_zero(1 + term / c)
            fraction *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return front * fraction


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def t_two_sided(t: float, df: float) -> float:
    """P(|T| >= |t|) for T with `df` degrees of freedom."""
    return incomplete_beta(df / 2, 0.5, df / (df + t * t))


def f_upper(f: float, df_above: float, df_below: float) -> float:
    """P(F >= f)."""
    return incomplete_beta(df_below / 2, df_above / 2, df_below / (df_below + df_above * f))


@lru_cache(maxsize=4096)
def t_critical(alpha: float, df: float) -> float:
    """The value that |T| exceeds with probability `alpha`."""
    return root(lambda t: alpha - t_two_sided(t, df))


@lru_cache(maxsize=1)
def _nodes() -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.legendre.leggauss(200)
    return nodes, weights


@lru_cache(maxsize=4096)
def power(shift: float, df: float, alpha: float) -> float:
    """Probability that a two-sided t test at level `alpha` finds a difference of `shift` standard errors."""
    return beyond(shift, df, t_critical(alpha, df))


def beyond(shift: float, df: float, critical: float) -> float:
    """P(|T| > critical) for T of the noncentral t distribution.

    Exact: the normal probability given the estimated standard error, integrated over the chi distribution of that estimate.
    """
    nodes_weights = _nodes()
    high = 1 + 9 / math.sqrt(df)
    low = max(0.0, 1 - 9 / math.sqrt(df))
    s = low + (high - low) * (nodes_weights[0] + 1) / 2  # the estimated standard error relative to the true one
    log_density = df / 2 * math.log(df / 2) - math.lgamma(df / 2) + math.log(2) + (df - 1) * np.log(s) - df * s * s / 2
    found = np.array([_normal(shift - critical * value) + _normal(-shift - critical * value) for value in s])
    return float((np.exp(log_density) * found * nodes_weights[1]).sum() * (high - low) / 2)


def _normal(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))


@lru_cache(maxsize=4096)
def shift_for_power(wanted: float, df: float, alpha: float) -> float:
    """The difference, in standard errors, that is found with probability `wanted`."""
    return root(lambda shift: power(shift, df, alpha) - wanted)


def root(rising: Callable[[float], float]) -> float:
    """The argument from 0 on at which a rising function is 0."""
    high = 1.0
    while rising(high) < 0 and high < 1e12:
        high *= 2
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
        if high - low <= 1e-14 * high:
            break
    return high
