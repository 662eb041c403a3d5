"""Charts as numbers: what page.js draws with uPlot, and what a reader without the script sees as a legend and a table.

uPlot (MIT) is part of the package, in `uplot/`, with its license, origin and checksums, and is copied into each page that has a chart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lmworks.pages.run_records import Mark, Point, Series, Stretch
from lmworks.ui.amounts import SHOWN

Gap = tuple[float, None]  # at this x a value was not finite: the line is interrupted
Style = Literal["line", "smooth", "thin", "faint", "dashed", "area"]
WORDS = {
    "bad": "bad step", "recipe": "recipe changed", "resume": "resumed", "corruption": "silent corruption", "slow_rank": "slow rank",
    "finding": "named by the doctor",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """`spans` are the extremes behind each point, `ranges` the x that it stands for, and `ends` the first and last value (None: not finite)
    where they are not those of the points. `tone` is a class of page.css. A `smooth` line is drawn faintly behind its moving mean, whose
    width the reader chooses. `run` counts the runs compared."""

    name: str
    points: Sequence[Point | Gap]
    tone: str
    spans: Sequence[tuple[float, float]] | None = None
    style: Style = "line"
    named: bool = True  # has a place in the legend
    run: int = 0
    ranges: Sequence[Stretch] | None = None
    ends: tuple[float | None, float | None] | None = None

    @property
    def first(self) -> float | None:
        return self.ends[0] if self.ends else self.points[0][1]

    @property
    def last(self) -> float | None:
        return self.ends[1] if self.ends else self.points[-1][1]

    @property
    def finite(self) -> list[Point]:
        return [(x, y) for x, y in self.points if y is not None]

    @property
    def lows(self) -> list[float]:
        return [low for low, _ in self.spans] if self.spans else [y for _, y in self.finite]

    @property
    def highs(self) -> list[float]:
        return [high for _, high in self.spans] if self.spans else [y for _, y in self.finite]


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with."""

    name: str
    value: float
    tone: str


@dataclass
class Chart:
    """Lines over the steps of a stage, or over `across`. Charts with the same `group` share cursor, zoom and `steps`, the range of x.

    `unit` names the y axis. With `rows`, each line is a row of a heat map, the first on top.
    """

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
    rows: bool = False
    across: str = ""  # what the x axis counts, where that is not steps
    across_shown: str = "compact"
    log_x: bool = False
    shade: tuple[float, float] | None = None  # a range of x

    @property
    def drawable(self) -> bool:
        """Whether a line has a finite value; in place of another chart stands a sentence."""
        return any(line.finite for line in self.lines)

    def view(self) -> dict[str, Any]:
        """What the template needs."""

        def show(value: float | None) -> str:
            return "not finite" if value is None else SHOWN[self.shown](value)

        cut = self.top is not None and any(y > self.top for line in self.lines for y in line.highs)
        near = self._near()
        named = [(n, line.name, line.tone, show(line.last)) for n, line in enumerate(self.lines) if line.named and line.points]
        return {
            "chart": self,
            "hint": f"{self.hint} The highest values lie above the axis; “log y” shows them." if cut else self.hint,
            "spoken": self._spoken(named),
            "legend": [] if self.rows else named,
            "levels": [
                (level.name if level in near else f"{level.name} (off the chart)", level.tone, show(level.value)) for level in self.levels
            ],
            "kinds": [(kind, WORDS.get(kind, kind)) for kind in sorted({mark.kind for mark in self.marks})],
            "numbers": [
                (line.name, *map(show, (line.first, min(line.lows, default=None), max(line.highs, default=None), line.last)))
                for line in self.lines
                if line.points
            ],
        }  # fmt: skip

    def data(self, grid: Grid) -> dict[str, Any]:
        """What the script needs to draw."""
        lines = []
        for line in self.lines:
            steps, values = grid.line(line.points)
            one: dict[str, Any] = {"name": line.name, "tone": line.tone, "style": line.style, "run": line.run}
            one |= {"steps": steps, "values": values, "last": _short(line.last) if line.points else None}
            if line.ranges is not None:
                one["from"], one["to"] = (grid.steps_of(side) for side in zip(*line.ranges, strict=True))
            if line.spans is not None and not self.rows:
                one["low"], one["high"] = ([_short(y) for y in side] for side in zip(*line.spans, strict=True))
            lines.append(one)
        return {
            "title": self.title, "group": self.group, "steps": self.steps, "shown": self.shown, "lines": lines, "rows": self.rows,
            "levels": [(level.value, level.tone) for level in self._near()], "log": self.log_y, "zero": self.zero, "top": self.top,
            "marks": [(mark.step, mark.kind, mark.text) for mark in sorted(self.marks, key=lambda mark: mark.step)],
            "phases": [one for one in self.phases if one[0] < self.steps[1]], "named": self.name_phases,
            "across": self.across, "acrossShown": self.across_shown, "logX": self.log_x, "shade": self.shade,
        }  # fmt: skip

    def _near(self) -> list[Level]:
        """The levels to draw: those that would flatten the lines have only their place in the legend."""
        values = [y for line in self.lines for _, y in line.finite]
        low, high = min(values, default=0.0), max(values, default=0.0)
        return [level for level in self.levels if low - 2 * (high - low) <= level.value <= high + 0.5 * (high - low) or high == low]

    def _spoken(self, named: Sequence[tuple[int, str, str, str]]) -> str:
        said = [f"{name} at last {value}" for _, name, _, value in named[:12]]
        said += [f"{level.name} at {SHOWN[self.shown](level.value)}" for level in self.levels]
        return f"{self.title}: {'; '.join(said)}."


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


class Grid:
    """Lines for the script, where many share their steps: each list of steps is written once."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []
        self._known: dict[tuple[float, ...], int] = {}

    def line(self, points: Sequence[Point | Gap]) -> tuple[int, list[float | None]]:
        return self.steps_of([x for x, _ in points]), [_short(y) for _, y in points]

    def steps_of(self, xs: Sequence[float]) -> int:
        key = tuple(float(f"{x:.9g}") for x in xs)
        if key not in self._known:
            self._known[key] = len(self.steps)
            self.steps.append([int(x) if x == int(x) else x for x in key])
        return self._known[key]


def line_of(series: Series, name: str, tone: str, style: Style = "line", named: bool = True, run: int = 0) -> Line:
    """A series with its extremes, and interrupted where no value was finite."""
    points: list[Point | Gap] = []
    spans: list[tuple[float, float]] = []
    ranges: list[Stretch] = []

    def interrupted(gap: Stretch | None) -> None:
        if gap is not None:
            points.append((max(sum(gap) / 2, points[-1][0] + 1e-3) if points else sum(gap) / 2, None))
            spans.append(spans[-1] if spans else (series.buckets[0].low[1], series.buckets[0].high[1]) if series else (0.0, 0.0))
            ranges.append(gap)

    interrupted(series.lead)
    for bucket in series.buckets:
        x, y = bucket.mean
        if bucket.gap is not None and bucket.gap[0] < x < bucket.gap[1]:  # of values before and after it
            x = (bucket.first[0] + bucket.gap[0]) / 2
        points.append((x, y))
        spans.append((bucket.low[1], bucket.high[1]))
        ranges.append((bucket.first[0], bucket.last[0]))
        interrupted(bucket.gap)
    several = any(first != last for first, last in ranges)
    wide = series.width > 1
    return Line(name, points, tone, spans if wide and series else None, style, named, run, ranges if several else None, series.ends)


def places(values: Sequence[float], room: float) -> Callable[[float], float]:
    """A scale from the range of `values`, with `room` (a share) at both ends, to 0 to 1."""
    low, high = min(values), max(values)
    edge = room * (high - low) if high > low else 1.0
    return lambda value: (value - low + edge) / (high - low + 2 * edge)
