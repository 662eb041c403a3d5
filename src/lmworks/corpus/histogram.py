"""Histograms that are computed per part and added up: quantiles within 1.6% over any range."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

_PER_OCTAVE = 32
_OCTAVES = 500  # above and below 1
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


class Histogram:
    """Counts in bins of constant relative width, 32 per octave (as DDSketch, Masson, Rim and Lee 2019, arXiv:1908.10693).

    The bins do not depend on the data, so histograms add up exactly in any order.
    """

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self.least, self.most = math.inf, -math.inf

    def add(self, values: Iterable[float]) -> None:
        """Count finite values; others are ignored."""
        for value in values:
            if math.isfinite(value):
                self._bins[_bin(value)] += 1
                self.least, self.most = min(self.least, value), max(self.most, value)

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram."""
        self._bins.update(other._bins)
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)

    @property
    def count(self) -> int:
        return self._bins.total()

    def quantile(self, share: float) -> float:
        """The value below which a fraction `share` of the values lies; NaN if there are none."""
        wanted, below = share * self.count, 0
        for number, count in sorted(self._bins.items()):
            below += count
            if below >= wanted:
                low, high = _edges(number)
                return min(max((low + high) / 2, self.least), self.most)
        return math.nan

    def as_json(self) -> dict[str, Any]:
        """Count, least, most, quantiles, and the bins as [lower edge, upper edge, count]."""
        if not self.count:
            return {"count": 0}
        quantiles = {f"{100 * share:g}%": self.quantile(share) for share in QUANTILES}
        bins = [[*_edges(number), count] for number, count in sorted(self._bins.items())]
        return {"count": self.count, "least": self.least, "most": self.most, "quantiles": quantiles, "bins": bins}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Histogram:
        """The inverse of `as_json`."""
        made = cls()
        for low, high, count in value.get("bins", ()):
            made._bins[_bin((low + high) / 2)] += count
        made.least, made.most = value.get("least", math.inf), value.get("most", -math.inf)
        return made


def _bin(value: float) -> int:
    """Bin numbers ascend with the value: negative numbers, 0, positive numbers. Tiny values count as 0; huge values fall into the last
    bin.
    """
    fraction, exponent = math.frexp(abs(value))
    if not fraction or exponent < -_OCTAVES:
        return 0
    step = int((fraction - 0.5) * 2 * _PER_OCTAVE)
    number = (min(exponent, _OCTAVES) + _OCTAVES) * _PER_OCTAVE + step + 1
    return number if value > 0 else -number


def _edges(number: int) -> tuple[float, float]:
    """(lower, upper) of a bin."""
    if not number:
        return 0.0, 0.0
    exponent, step = divmod(abs(number) - 1, _PER_OCTAVE)
    low, high = (math.ldexp(0.5 + place / 2 / _PER_OCTAVE, exponent - _OCTAVES) for place in (step, step + 1))
    return (low, high) if number > 0 else (-high, -low)
