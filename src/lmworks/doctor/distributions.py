"""Distributions before and after, as outlines over one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmworks.corpus.histogram import Histogram
from lmworks.doctor.charts import Axis
from lmworks.doctor.formatting import SHOWN

_MOST_BINS = 48
_EDGE = 0.002  # of the values at either end are drawn with their neighbors


@dataclass(frozen=True)
class Distribution:
    """Histograms (as `Histogram.as_json`) by name, each as shares of its own documents. `tones` are classes of page.css."""

    id: str
    title: str
    hint: str
    sides: Mapping[str, Mapping[str, Any]]
    tones: Sequence[str] = ("c6", "c0")
    shown: str = "number"
    log: bool = True

    def view(self) -> dict[str, Any]:
        """What the template needs."""
        low, high = self._range()
        x = Axis(low, high, log=self.log and low > 0)
        bins = self._bins()
        edges = [_at(x, place / bins) for place in range(bins + 1)]
        shares = {name: _shares(value, edges) for name, value in self.sides.items() if value["count"]}
        y = Axis(0.0, 1.05 * max((max(one) for one in shares.values()), default=1.0))
        show = SHOWN[self.shown]
        return {
            "chart": self,
            "spoken": f"{self.title}: "
            + "; ".join(f"{name}, half of {self.sides[name]['count']:,} below {show(_median(self.sides[name]))}" for name in shares),
            "paths": [(tone, _outline(one, y)) for tone, one in zip(self.tones, shares.values(), strict=False)],
            "ticks": [(x.place(tick), show(tick)) for tick in x.ticks(5)],
            "y_ticks": [(y.place(tick), f"{100 * tick:.3g}%") for tick in y.ticks(4)],
            "legend": [(name, tone, f"median {show(_median(self.sides[name]))}") for tone, name in zip(self.tones, shares, strict=False)],
        }

    def _range(self) -> tuple[float, float]:
        whole = Histogram()
        for value in self.sides.values():
            whole.merge(Histogram.from_json(dict(value)))
        low, high = whole.quantile(_EDGE), whole.quantile(1 - _EDGE)
        return (low, high) if high > low else (low - abs(low) / 2, low + (abs(low) / 2 or 1.0))

    def _bins(self) -> int:
        """Twice the cube root of their number (Rice's rule), so that few documents are no comb."""
        most = max((value["count"] for value in self.sides.values()), default=0)
        return max(8, min(_MOST_BINS, round(2 * most ** (1 / 3))))


def _at(x: Axis, share: float) -> float:
    if x.log:
        return float(x.low * (x.high / x.low) ** share)
    return x.low + (x.high - x.low) * share


def _median(value: Mapping[str, Any]) -> float:
    return float(value["quantiles"]["50%"])


def _shares(value: Mapping[str, Any], edges: Sequence[float]) -> list[float]:
    """Share of the values between each two edges; bins that an edge cuts are divided as if they were even."""
    found = [0.0] * (len(edges) - 1)
    for low, high, count in value["bins"]:
        inside = [max(0.0, min(high, edges[place + 1]) - max(low, edges[place])) for place in range(len(found))]
        width = sum(inside)
        if width:
            for place, part in enumerate(inside):
                found[place] += count * part / width
        else:
            place = 0 if high <= edges[0] else len(found) - 1 if low >= edges[-1] else _holding(low, edges)
            found[place] += count
    return [one / value["count"] for one in found]


def _holding(value: float, edges: Sequence[float]) -> int:
    return next(place for place in range(len(edges) - 1) if value <= edges[place + 1])


def _outline(shares: Sequence[float], y: Axis) -> str:
    width = 1000 / len(shares)
    steps = (f"V{1000 - 1000 * y.place(share):.1f}H{width * (place + 1):.1f}" for place, share in enumerate(shares))
    return f"M0 1000{''.join(steps)}V1000z"
