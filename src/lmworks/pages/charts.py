"""Charts as geometry: paths, ticks and marks in shares of the plot, which the template draws at any size.

The plot is an SVG of 1000 x 1000 units stretched over its frame, with strokes that do not stretch; all text is beside it as
HTML. So a chart is sharp on a phone and on a wall, and needs no script. page.js draws the same lines again from `Chart.data`, on the axis,
the range and the smoothing that the reader chooses. A heat map of layers over steps is a few paths: one for each of some levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from lmworks.pages.run_records import Mark, Point, Series
from lmworks.ui.amounts import SHOWN, compact, significant

_DOTS = 24  # points up to which each is marked
_MARKS_APART = 0.004  # of the width; nearer marks of a kind are drawn as one
_TEXTS = 8  # of marks drawn as one, that are spelt out

Kind = Literal["plain", "raw", "smoothed"]


@dataclass(frozen=True)
class Line:
    """`points` are read out; `drawn` (the same where left out) is what one sees; `spans` are the extremes behind each point.

    `tone` is a class of page.css. A line that is `smoothed` is made of the one before it. `run` counts the runs compared.
    """

    name: str
    points: list[Point]
    tone: str
    drawn: list[Point] | None = None
    spans: list[tuple[float, float]] | None = None
    kind: Kind = "plain"
    read: bool = True  # has a place in the legend and a read-out
    run: int = 0


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with."""

    name: str
    value: float
    tone: str


@dataclass
class Chart:
    """Lines over the steps of a stage. Charts with the same `group` share their cursor. `unit` names the y axis."""

    id: str
    title: str
    hint: str
    lines: list[Line]
    steps: tuple[float, float]
    unit: str = ""
    shown: str = "number"
    group: str = "pretrain"
    levels: list[Level] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)
    log_y: bool = False
    zero: bool = False  # the y axis begins at 0
    top: float | None = None  # of the y axis, for series whose first points would flatten the rest
    wide: bool = False
    name_phases: bool = False

    def view(self) -> dict[str, Any]:
        """What the template needs."""
        x, y = Axis(*self.steps), Axis(*self._range(), log=self.log_y)
        cut = self.top is not None and any(value > y.high for value in self._values())
        return {
            "chart": self,
            "hint": f"{self.hint} The highest values lie above the axis; “log y” shows them." if cut else self.hint,
            "spoken": self._spoken(),
            "ticks": [(x.place(t), compact(t)) for t in x.ticks(6)],
            "paths": [(line.tone, path(line.points if line.drawn is None else line.drawn, x, y)) for line in self.lines],
            "dots": [dots(line.points, x, y) if line.read and len(line.points) <= _DOTS else "" for line in self.lines],
            "phases": self._phase_bands(x),
            "marks": _spread(self.marks, x),
            "y_ticks": [(y.place(t), SHOWN[self.shown](t)) for t in y.ticks(6 if self.wide else 4)],
            "levels": [(level, y.place(level.value)) for level in self.levels],
            "near": self._near(),
            "legend": [
                (n, line.name, line.tone, SHOWN[self.shown](line.points[-1][1])) for n, line in enumerate(self.lines) if line.read
            ],
            "level_legend": [
                (level.name if level in self._near() else f"{level.name} (off the chart)", level.tone, SHOWN[self.shown](level.value))
                for level in self.levels
            ],
            "kinds": sorted({mark.kind for mark in self.marks}),
        }

    def data(self, grid: Grid) -> dict[str, Any]:
        """What the script needs to read values out and to draw the lines again: of each its steps, values, kind, run, and spans."""
        lines = []
        for line in self.lines:
            spans = [[float(f"{y:.5g}") for y in side] for side in zip(*line.spans, strict=True)] if line.spans else []
            lines.append([*grid.line(line.points), line.kind, line.run, *spans])
        return {
            "group": self.group, "steps": self.steps, "shown": self.shown, "lines": lines, "levels": [level.value for level in self.levels],
            "log": self.log_y, "zero": self.zero, "top": self.top, "ticks": 6 if self.wide else 4,
        }  # fmt: skip

    def _values(self) -> list[float]:
        return [y for line in self.lines for _, y in (line.points if line.drawn is None else line.drawn)]

    def _near(self) -> list[Level]:
        """The levels to draw: those that would flatten the lines have only their place in the legend."""
        values = self._values()
        low, high = min(values), max(values)
        return [level for level in self.levels if low - 2 * (high - low) <= level.value <= high + 0.5 * (high - low) or high == low]

    def _range(self) -> tuple[float, float]:
        values = [*self._values(), *(level.value for level in self._near())]
        low, high = min(values), max(values)
        if self.top is not None:
            high = min(high, max(self.top, low))
        if self.log_y:
            low = max(low, 1e-12)
            return low / 1.15, max(high, low) * 1.15
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        return (0.0 if self.zero else low - room), high + room

    def _phase_bands(self, x: Axis) -> list[dict[str, Any]]:
        starts = [*((max(at, self.steps[0]), name) for at, name in self.phases if at < self.steps[1]), (self.steps[1], "")]
        return [
            {"step": at, "end": end, "left": x.place(at), "width": x.place(end) - x.place(at), "name": name}
            for (at, name), (end, _) in pairwise(starts)
        ]

    def _spoken(self) -> str:
        show = SHOWN[self.shown]
        ends = [(line.name, line.points[0], line.points[-1]) for line in self.lines if line.read]
        said = [
            f"{name} from {show(y)} at step {x:,.0f} to {show(y_last)} at step {x_last:,.0f}" for name, (x, y), (x_last, y_last) in ends
        ]
        said += [f"{level.name} at {show(level.value)}" for level in self.levels]
        return f"{self.title}: {'; '.join(said)}."


class Axis:
    """A scale from values to shares of the plot's width or height."""

    def __init__(self, low: float, high: float, log: bool = False) -> None:
        self.low, self.high = low, high if high > low else low + 1
        self._of: Callable[[float], float] = (lambda v: math.log(max(v, 1e-300))) if log else float
        self.log = log
        self._start, self._length = self._of(self.low), self._of(self.high) - self._of(self.low)

    def place(self, value: float) -> float:
        return (self._of(value) - self._start) / self._length

    def ticks(self, about: int) -> list[float]:
        """Round values within the scale, about so many."""
        if self.log and self.high / self.low > 3:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = next((s for s in ((1, 2, 5), (1, 3), (1,)) if len(decades) * len(s) <= 2 * about + 2), (1,))
            ticks = [factor * 10.0**decade for decade in decades for factor in steps]
            ticks = ticks[:: max(1, len(ticks) // (2 * about))]
        else:
            raw = (self.high - self.low) / about
            power = 10.0 ** math.floor(math.log10(raw))
            step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
            ticks = [round(n * step, 12) for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [tick for tick in ticks if self.low <= tick <= self.high]


class Grid:
    """Lines for the script, where many share their steps: each list of steps is written once."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []
        self._known: dict[tuple[float, ...], int] = {}

    def line(self, points: Sequence[Point]) -> list[Any]:
        key = tuple(round(x, 1) for x, _ in points)
        if key not in self._known:
            self._known[key] = len(self.steps)
            self.steps.append([int(x) if x == int(x) else x for x in key])
        return [self._known[key], [float(f"{y:.5g}") for _, y in points]]


def path(points: Sequence[Point], x: Axis, y: Axis) -> str:
    """A polyline; points far outside are clamped near the edge, because some browsers fail with huge numbers."""
    pairs = (f"{_unit(x.place(px))} {_unit(1 - y.place(py))}" for px, py in points)
    text = "L".join(pairs)
    # a line of one point would not be seen
    return f"M{text}h1" if len(points) == 1 else f"M{text}"


def dots(points: Sequence[Point], x: Axis, y: Axis) -> str:
    """A path of lengths zero, which round caps turn into dots."""
    return "".join(f"M{_unit(x.place(px))} {_unit(1 - y.place(py))}h0" for px, py in points)


def _unit(share: float) -> str:
    return f"{1000 * min(max(share, -1.0), 2.0):.1f}".removesuffix(".0")


def smooth(points: list[Point]) -> list[Point]:
    """A centered mean with Gaussian weights, about 1.5% of the series wide but never wider than a fifth of the way from the start,
    so that the steep beginning stays steep also on a logarithmic axis."""
    smoothed = []
    for at, (x, _) in enumerate(points):
        width = min(0.015 * len(points), 0.2 * at)
        if width < 0.5:
            smoothed.append(points[at])
            continue
        reach = math.ceil(2.5 * width)
        near = points[max(0, at - reach) : at + reach + 1]
        weights = [math.exp(-(((n + max(0, at - reach)) - at) ** 2) / (2 * width * width)) for n in range(len(near))]
        smoothed.append((x, sum(w * p[1] for w, p in zip(weights, near, strict=True)) / sum(weights)))
    return smoothed


def raw_and_smooth(series: Series, name: str, tone: str) -> list[Line]:
    """Two lines of one series: every excursion in the background, the course in front."""
    means = series.means()
    course = smooth(means)
    if course == means:  # too short to smooth
        return [Line(name, means, tone)]
    spans = series.spans() if series.width > 1 else None
    return [Line(name, means, f"raw {tone}", series.outline(), spans, "raw"), Line("smoothed", course, tone, kind="smoothed")]


def _spread(marks: list[Mark], x: Axis) -> list[dict[str, Any]]:
    """Positions of the marks; crowded marks are merged into one with their number."""
    placed: list[dict[str, Any]] = []
    newest: dict[str, dict[str, Any]] = {}
    for mark in sorted(marks, key=lambda mark: mark.step):
        at = x.place(max(mark.step, x.low))
        if at > 1.001:
            continue
        text = f"step {mark.step:,}: {mark.text}"
        before = newest.get(mark.kind)
        if before is not None and at - before["left"] < _MARKS_APART:
            if len(before["texts"]) < _TEXTS:
                before["texts"].append(text)
            else:
                before["more"] += 1
            continue
        newest[mark.kind] = {"left": min(at, 1.0), "kind": mark.kind, "step": mark.step, "texts": [text], "more": 0}
        placed.append(newest[mark.kind])
    return placed


LEVELS = 12


@dataclass
class Heatmap:
    """`rows` maps a row's name to its points, from the top down. Charts with the same `group` share their cursor."""

    id: str
    title: str
    hint: str
    rows: dict[str, list[Point]]
    steps: tuple[float, float]
    group: str = "pretrain"

    def view(self) -> dict[str, Any]:
        """What the template needs. Colours end at the 98th percentile, so that a bad beginning does not bleach the rest."""
        values = sorted(y for points in self.rows.values() for _, y in points)
        top = values[int(0.98 * (len(values) - 1))] or 1.0
        x = Axis(*self.steps)
        height = 1000 / len(self.rows)
        paths: list[list[str]] = [[] for _ in range(LEVELS)]
        for row, points in enumerate(self.rows.values()):
            edges = _edges([x.place(at) for at, _ in points])
            levels = [min(LEVELS - 1, int(LEVELS * min(1.0, max(0.0, y / top)))) for _, y in points]
            start = 0
            for at in range(1, len(points) + 1):
                if at == len(points) or levels[at] != levels[start]:
                    left, right = 1000 * edges[start], 1000 * edges[at]
                    paths[levels[start]].append(f"M{left:.1f} {row * height:.1f}H{right:.1f}V{(row + 1) * height:.1f}H{left:.1f}z")
                    start = at
        often = max(1, -(-len(self.rows) // 12))
        return {
            "chart": self,
            "spoken": f"{self.title}: {len(self.rows)} layers over {self.steps[1]:,.0f} steps, "
            f"between {significant(values[0], 3)} and {significant(values[-1], 3)}.",
            "paths": [(level, "".join(parts)) for level, parts in enumerate(paths) if parts],
            "ticks": [(x.place(tick), compact(tick)) for tick in x.ticks(6)],
            "rows": [((n + 0.5) / len(self.rows), name) for n, name in enumerate(self.rows) if n % often == 0],
            "top": significant(top, 2),
            "levels": range(LEVELS),
        }

    def data(self, grid: Grid) -> dict[str, Any]:
        """What the script needs to read values out."""
        return {
            "group": self.group,
            "steps": self.steps,
            "shown": "number",
            "rows": list(self.rows),
            "lines": [[*grid.line(points), "plain", 0] for points in self.rows.values()],
        }


def _edges(centers: list[float]) -> list[float]:
    """Where one column ends and the next begins: half-way."""
    inner = [(a + b) / 2 for a, b in pairwise(centers)]
    return [max(0.0, centers[0] - 0.01) if len(centers) == 1 else 0.0, *inner, 1.0]
