"""The exact size of Welch's t test: its error rate at the ratio of the two variances at which that is largest.

Welch's test (1947) divides a difference by the standard error of two variances that need not be equal, and approximates the degrees of
freedom (Satterthwaite 1946). With few values and at the small levels that many comparisons leave, the approximation lets through more than
its level: 6.5% of families instead of 5% with eight comparisons of four values each. The size of a test that rejects at p <= a is computed
here and takes the place of p.

With X1, X2 chi-squared of v degrees of freedom, B = X1 / (X1 + X2) is a Beta(v / 2, v / 2) variable, independent of X1 + X2. Given B, with
r the share of the first variance in that of the difference, the statistic is Student's t of 2 v degrees of freedom divided by
sqrt(2 (r B + (1 - r) (1 - B))). The size is one integral over B for each r, and the largest over r is taken.

The distributions are scipy's, but for the noncentral t, which is not a number there far from the center. Like `contrast`, `verdict` and
`quality`, these are pure functions of numbers, without files or recipes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy.special import fdtrc, ndtr, stdtr, stdtrit


def t_two_sided(t: float, df: float) -> float:
    """P(|T| >= |t|) for T with `df` degrees of freedom."""
    return float(2 * stdtr(df, -abs(t)))


def f_upper(f: float, df_above: float, df_below: float) -> float:
    """P(F >= f)."""
    return float(fdtrc(df_above, df_below, f))


def t_critical(alpha: float, df: float) -> float:
    """The value that |T| exceeds with probability `alpha`."""
    return float(-stdtrit(df, alpha / 2))


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
    nodes, weights = _nodes()
    high = 1 + 9 / math.sqrt(df)
    low = max(0.0, 1 - 9 / math.sqrt(df))
    s = low + (high - low) * (nodes + 1) / 2  # the estimated standard error relative to the true one
    log_density = df / 2 * math.log(df / 2) - math.lgamma(df / 2) + math.log(2) + (df - 1) * np.log(s) - df * s * s / 2
    found = ndtr(shift - critical * s) + ndtr(-shift - critical * s)
    return float((np.exp(log_density) * found * weights).sum() * (high - low) / 2)


def root(rising: Callable[[float], float]) -> float:
    """The argument from 0 on at which a rising function is 0."""
    high = 1.0
    while rising(high) < 0 and high < 1e12:
        high *= 2
    low = 0.0
    for _ in range(100):
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
    nodes, weights = _nodes()
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
        critical = np.polynomial.Polynomial.fit(inverse_dfs, np.log(-stdtrit(1 / inverse_dfs, level / 2)), _DEGREE)
        outside = 2 * stdtr(2 * df, -np.exp(critical(inverse_df)) * np.sqrt(2 * total))
        found.append(max(float(level), float((outside @ density).max())))
    return np.array([*found, 1.0])
