"""The exact size of Welch's t test: its error rate at the ratio of the two variances at which that is largest.

Welch's test (1947) divides a difference by the standard error of two variances that need not be equal, and approximates the degrees of
freedom (Satterthwaite 1946). With few values and at the small levels that many comparisons leave, the approximation lets through more than
its level: 6.5% of families instead of 5% with eight comparisons of four values each. The size of a test that rejects at p <= a is computed
here and takes the place of p.

With X1, X2 chi-squared of v degrees of freedom, B = X1 / (X1 + X2) is a Beta(v / 2, v / 2) variable, independent of X1 + X2. Given B, with
r the share of the first variance in that of the difference, the statistic is Student's t of 2 v degrees of freedom divided by
sqrt(2 (r B + (1 - r) (1 - B))). The size is one integral over B for each r, and the largest over r is taken.

Student's t and F distributions follow from the regularized incomplete beta function, by its continued fraction (DLMF 8.17.22). Like
`contrast`, `verdict` and `quality`, these are pure functions of numbers, without files or recipes.
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
def t_power(shift: float, df: float, alpha: float) -> float:
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
    return root(lambda shift: t_power(shift, df, alpha) - wanted)


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


_LEVELS = np.logspace(-12, 0, 25)
_SHARES = 1 / (1 + np.exp(-np.linspace(-8, 8, 41)))
_NODES = 9  # degrees of freedom at which critical values are computed; between them their logarithm is a polynomial
_DEGREE = 6
_MOST = 60  # degrees of freedom; with more, the size is nearer to the level, so that this one is used


def size(p: float, df: float) -> float:
    """The largest probability, over all ratios of the true variances, that Welch's p value of two variances of `df` degrees of freedom
    each is at most `p`."""
    ratios = np.log(_table(min(int(df), _MOST)) / _LEVELS)
    return min(1.0, p * math.exp(float(np.interp(math.log(max(p, _LEVELS[0])), np.log(_LEVELS), ratios))))


@lru_cache(maxsize=4096)
def nominal(level: float, df: float) -> float:
    """The level of Welch's test whose size is `level`."""
    low, high = _LEVELS[0] * 1e-3, level  # the size is never below the level
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if size(middle, df) <= level else (low, middle)
    return low


@lru_cache(maxsize=4096)
def power(shift: float, df: int, level: float, share: float) -> float:
    """Probability that the test of size `level` finds a difference of `shift` standard errors, where the first variance is `share` of the
    variance of the difference, and each is estimated with `df` degrees of freedom."""
    nodes, weights = np.polynomial.legendre.leggauss(16)
    angles = (nodes + 1) * math.pi / 4
    density = weights * np.sin(2 * angles) ** (df - 1)
    found, alpha = 0.0, nominal(level, df)
    for b, weight in zip(np.sin(angles) ** 2, density / density.sum(), strict=True):
        first, second = share * b, (1 - share) * (1 - b)
        of_total = first + second
        critical = t_critical(alpha, df * of_total**2 / (first**2 + second**2))
        found += weight * beyond(shift, 2 * df, critical * math.sqrt(2 * of_total))
    return float(found)


@lru_cache(maxsize=_MOST)
def _table(df: int) -> np.ndarray:
    """The size at each of `_LEVELS`."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    angles = (nodes + 1) * math.pi / 4
    b, r = np.sin(angles)[None, :] ** 2, _SHARES[:, None]
    density = weights * np.sin(2 * angles) ** (df - 1)
    density /= density.sum()
    of_first, of_second = r * b, (1 - r) * (1 - b)
    total = of_first + of_second
    inverse_df = (of_first**2 + of_second**2) / total**2 / df
    inverse_dfs = np.linspace(1 / (2 * df), 1 / df, _NODES)
    found = []
    for level in _LEVELS[:-1]:
        critical = np.polynomial.Polynomial.fit(inverse_dfs, [math.log(t_critical(float(level), 1 / one)) for one in inverse_dfs], _DEGREE)
        beyond = _two_sided(np.exp(critical(inverse_df)) * np.sqrt(2 * total), 2 * df)
        found.append(max(float(level), float((beyond @ density).max())))
    return np.array([*found, 1.0])


def _two_sided(t: np.ndarray, df: int) -> np.ndarray:
    """P(|T| >= t) for an even number of degrees of freedom (Abramowitz and Stegun 26.7.4)."""
    angle = np.arctan(t / math.sqrt(df))
    squared, term = np.cos(angle) ** 2, np.ones_like(t)
    total = term
    for k in range(2, df, 2):
        term = term * squared * (k - 1) / k
        total = total + term
    return np.asarray(np.clip(1 - np.sin(angle) * total, 0, 1))
