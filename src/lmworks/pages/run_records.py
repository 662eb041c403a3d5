"""The records of a run, as the run page shows them; `read_run` reads them.

Long series are kept in bounded memory: what a chart can show of millions of points, from one pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmworks.recipe.schema.recipe import Recipe

Point = tuple[float, float]
Stretch = tuple[float, float]  # first and last x


@dataclass(slots=True)
class Bucket:
    """A stretch of neighboring points: its ends, its extremes, its mean."""

    first: Point
    last: Point
    low: Point
    high: Point
    sum_x: float
    sum_y: float
    count: int
    gap: Stretch | None = None  # the longest in it or right after it in which no value was finite

    @property
    def mean(self) -> Point:
        return self.sum_x / self.count, self.sum_y / self.count

    def extend(self, after: Bucket) -> None:
        """Take in the bucket that follows."""
        self.last = after.last
        if after.low[1] < self.low[1]:
            self.low = after.low
        if after.high[1] > self.high[1]:
            self.high = after.high
        self.sum_x += after.sum_x
        self.sum_y += after.sum_y
        self.count += after.count
        self.gap = _longer(self.gap, after.gap)


def _longer(one: Stretch | None, other: Stretch | None) -> Stretch | None:
    """The longer of two stretches, the first where they are equal."""
    return max((gap for gap in (one, other) if gap is not None), key=lambda gap: gap[1] - gap[0], default=None)


class Series:
    """Points with rising x, of which at most `most` buckets are kept (an even number, at least 2).

    Each bucket covers `width` points. Whenever they are all used, neighbors are merged and the width doubles, so that nothing
    need be known about the length. As in M4 (Jugel et al., VLDB 2014) a bucket keeps its lowest and highest point, so no spike is lost,
    and where values were not finite. A series may have no finite value, and then has no buckets.
    """

    def __init__(self, most: int = 500) -> None:
        assert most >= 2 and most % 2 == 0
        self.most, self.width, self.count = most, 1, 0
        self.buckets: list[Bucket] = []
        self.lead: Stretch | None = None  # before the first finite value
        self.gap: Stretch | None = None  # at the end: no value since has been finite

    def add(self, x: float, y: float) -> None:
        self.count += 1
        self.gap = None
        point = (x, y)
        buckets = self.buckets
        if buckets and buckets[-1].count < self.width:
            bucket = buckets[-1]
            bucket.last = point
            if y < bucket.low[1]:
                bucket.low = point
            elif y > bucket.high[1]:
                bucket.high = point
            bucket.sum_x += x
            bucket.sum_y += y
            bucket.count += 1
            return
        if len(buckets) == self.most:
            for bucket, after in zip(buckets[::2], buckets[1::2], strict=True):
                bucket.extend(after)
            del buckets[1::2]
            self.width *= 2
        buckets.append(Bucket(point, point, point, point, x, y, 1))

    def interrupt(self, x: float) -> None:
        """A value at `x` was not finite."""
        self.gap = (x if self.gap is None else self.gap[0], x)
        if self.buckets:
            self.buckets[-1].gap = _longer(self.gap, self.buckets[-1].gap)
        else:
            self.lead = self.gap

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def first(self) -> Point:
        return self.buckets[0].first

    @property
    def last(self) -> Point:
        return self.buckets[-1].last

    @property
    def low(self) -> Point:
        """The lowest of all points, the first of them where there are more."""
        return min((bucket.low for bucket in self.buckets), key=lambda point: point[1])

    @property
    def high(self) -> Point:
        """The highest of all points, the first of them where there are more."""
        return max((bucket.high for bucket in self.buckets), key=lambda point: point[1])

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """The first and the last value; None for one that was not finite."""
        return None if self.lead or not self.buckets else self.first[1], None if self.gap or not self.buckets else self.last[1]

    @property
    def reach(self) -> Stretch:
        """The first and the last x at which there was a value, finite or not."""
        known = [x for gap in (self.lead, self.gap) if gap is not None for x in gap]
        known += [self.first[0], self.last[0]] if self.buckets else []
        return min(known), max(known)

    def means(self) -> list[Point]:
        """One point of each bucket: what to draw, to smooth and to read out."""
        return [bucket.mean for bucket in self.buckets]

    def median(self) -> float:
        """Of the buckets' means; of the points themselves while there are few."""
        values = sorted(y for _, y in self.means())
        return values[len(values) // 2]


Json = dict[str, Any]


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step of a training stage."""

    kind: str
    step: int
    text: str


@dataclass(frozen=True)
class Start:
    """A start or resume of training at `time`, on `ranks` ranks, each with a GPU or, if `cores` is above 0, that many CPU cores. The
    process before has written metrics until the time `before`, and the last that were written, `trained` seconds after their process began,
    were of the step `reached`; those of steps that are trained again are no longer there. This process begins after `step`."""

    time: float
    ranks: int = 1
    cores: int = 0
    before: float = 0.0
    trained: float | None = None
    reached: int = -1
    step: int = -1


@dataclass
class Training:
    """The records of a training stage (pretraining or tuning)."""

    series: dict[str, Series] = field(default_factory=dict)
    samples: dict[str, list[Json]] = field(default_factory=dict)  # prompt -> lines, oldest first
    marks: list[Mark] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    newest: float = 0.0  # the time of the newest start or line
    since: float = 0.0  # the time at which it started over: what was recorded before is of another course
    phases: list[tuple[int, str]] = field(default_factory=list)
    planned_steps: int = 0
    planned_tokens: int = 0
    seconds: float = 0.0  # of training, without pauses between processes
    elapsed: Series = field(default_factory=Series)  # these seconds, by step
    device_seconds: float = 0.0  # summed over ranks
    core_seconds: float = 0.0  # summed over CPU cores; 0 on GPUs
    prediction: Json = field(default_factory=dict)  # the newest, from before the first step
    scored: Json = field(default_factory=dict)  # what was measured of its figures at the end
    tokens_per_second: float = 0.0  # recent wall-clock speed, including saves and validation
    done: bool = False

    def measured(self) -> dict[str, float]:
        """The measured values that a prediction is compared with; the time only of finished training."""
        speed, memory = self.series.get("perf/tokens_per_second"), self.series.get("perf/memory")
        found = {"perf/tokens_per_second": speed and speed.median(), "perf/memory": memory and memory.high[1]}
        return {name: value for name, value in found.items() if value} | ({"seconds": self.seconds} if self.done else {})

    def last(self, name: str) -> float | None:
        """The last finite value."""
        return series.last[1] if (series := self.series.get(name)) else None

    @property
    def step(self) -> int:
        return int(max((series.reach[1] for series in self.series.values()), default=0))

    @property
    def has_objective(self) -> bool:
        """Whether the stage minimizes something else than the loss of the next token."""
        return any(name.startswith(("dpo/", "grpo/")) for name in self.series)

    def add_time(self, seconds: float, own: Start) -> None:
        self.seconds += seconds
        self.device_seconds += own.ranks * seconds
        self.core_seconds += own.ranks * own.cores * seconds

    def start_over(self, time: float) -> None:
        """Forget what was recorded of the former course, of which no step is left."""
        self.marks, self.phases, self.scored, self.since = [], [], {}, time


@dataclass
class Run:
    """A run in its current state. Missing parts are empty."""

    directory: Path
    name: str
    recipe: Recipe | None
    tree: Json
    training: dict[str, Training]  # pretrain, tune
    events: list[Json]
    events_omitted: int
    corpus: Json
    tokenizer: Json
    results: Json
    parity: Json
    stages: list[Json]  # name, state (done | stale: of an earlier model | begun | open), seconds
    state: str
    reason: str
    findings: list[Json]  # of the doctor, the worst first

    @property
    def pretrain(self) -> Training:
        return self.training["pretrain"]

    def stale(self, stage: str) -> bool:
        """Whether the stage was done with an earlier model."""
        return any(one["name"] == stage and one["state"] == "stale" for one in self.stages)
