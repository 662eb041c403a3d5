"""The evidence of one stage of a run, from its files: metrics as arrays, events of the ledger, values of the recipe.

Rules (`watch/rules/`) judge it. It is read in seconds and bounded memory, of a run that is still going, has died, or was made by an earlier
version. Values of metrics that are not numbers, and numbers that no measurement can be, are absent.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lmworks.host import machine
from lmworks.io.run_layout import BASE, MODEL_STAGES, ModelStage
from lmworks.recipe.former import translated
from lmworks.recipe.schema.units import Bytes, Duration, Seconds, Tokens
from lmworks.watch.ledger import GREW, LEDGER, since_start_over
from lmworks.watch.run_files import INDEX, Json, RunFiles, read_document, read_lines

_MOST = 1e100  # the square of a larger value is no number
_MOST_NAMES = 20_000  # of metrics


@dataclass(frozen=True)
class Series:
    """One metric: `steps` (N, int64, ascending) and `values` (N, fp64); NaN where a line says null, which stands for a value that was not
    finite."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> Series:
        """Without values that are not finite."""
        keep = np.isfinite(self.values)
        return Series(self.steps[keep], self.values[keep])

    def between(self, start: float, stop: float) -> Series:
        """The steps from `start` to before `stop`."""
        keep = (self.steps >= start) & (self.steps < stop)
        return Series(self.steps[keep], self.values[keep])

    def part(self, start: float, stop: float) -> Series:
        """A part of the values by their number: `part(0.75, 1)` is the last quarter."""
        return Series(*(array[int(len(self) * start) : max(int(len(self) * stop), int(len(self) * start))] for array in self._arrays))

    @property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return self.steps, self.values

    @property
    def median(self) -> float:
        """Of the finite values; NaN without any."""
        values = self.values[np.isfinite(self.values)]
        return float(np.median(values)) if len(values) else float("nan")

    @property
    def mean(self) -> float:
        """Of the finite values; NaN without any."""
        values = self.values[np.isfinite(self.values)]
        return float(values.mean()) if len(values) else float("nan")

    @property
    def first(self) -> float:
        """The first value; NaN without any."""
        return float(self.values[0]) if len(self) else float("nan")

    @property
    def last(self) -> float:
        """The last value; NaN without any."""
        return float(self.values[-1]) if len(self) else float("nan")

    def share(self, above: float) -> float:
        """Share of the finite values above a value; NaN without any."""
        values = self.values[np.isfinite(self.values)]
        return float((values > above).mean()) if len(values) else float("nan")


@dataclass(frozen=True)
class WholeRun:
    """What all stages of a run share, read once: the recipe with all values, the events of the ledger, and its lines that are none."""

    tree: Json
    events: Sequence[Json]
    unreadable: int

    @classmethod
    def read(cls, files: RunFiles) -> WholeRun:
        lines, unreadable = read_lines(files, LEDGER)
        events = [event for event in lines if isinstance(event.get("event"), str)]
        return cls(translated(read_document(files, "resolved.json")), events, unreadable + len(lines) - len(events))


class Evidence:
    """What is known of one stage of a run; `whole` is read where it is not given.

    stage: which one. tree: the recipe with all values; empty if the run has none that can be read. events: those of the ledger that belong
    to this stage or to none, oldest first, since the stage last started over. lines: those of the metrics.
    unreadable: lines of the ledger and of the metrics that are no JSON object.
    """

    def __init__(self, files: RunFiles, stage: ModelStage = BASE, whole: WholeRun | None = None) -> None:
        whole = WholeRun.read(files) if whole is None else whole
        self.files, self.stage, self.tree = files, stage.stage, whole.tree
        self.events: Sequence[Json] = [
            dict(event) for event in since_start_over(whole.events, self.stage) if event.get("stage", self.stage) == self.stage
        ]
        self.lines, more = read_lines(files, f"{stage.folder}/metrics.jsonl" if stage.folder else "metrics.jsonl")
        self.unreadable = whole.unreadable + more
        self._documents: dict[str, Json] = {}

    # Metrics.

    @cached_property
    def _columns(self) -> Mapping[str, Series]:
        points: dict[str, tuple[list[int], list[float]]] = {}
        for line in self.lines:
            step = line.get("step")
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
                continue
            for name, value in line.items():
                if value is None:
                    value = float("nan")
                elif isinstance(value, bool) or not isinstance(value, int | float) or not -_MOST < value < _MOST:
                    continue
                if name not in points:
                    if len(points) >= _MOST_NAMES:
                        continue
                    points[name] = ([], [])
                points[name][0].append(step)
                points[name][1].append(value)
        return {name: _ascending(steps, values) for name, (steps, values) in points.items()}

    def series(self, name: str) -> Series:
        """A metric, or the `time` of its lines (seconds since 1970); empty if it was not written."""
        return self._columns.get(name, Series(np.zeros(0, np.int64), np.zeros(0)))

    def has(self, name: str) -> bool:
        """Whether a metric was written; a name with braces stands for all with something in their place."""
        return bool(self.names(name)) if "{" in name else len(self.series(name)) > 0

    def names(self, pattern: str = "{name}") -> list[str]:
        """The metrics whose name has the form of `pattern`: `train/source/{source}/loss`. Braces stand for one part or, as the whole
        pattern, for any name."""
        if pattern == "{name}":
            return [name for name in self._columns if name not in ("step", "time")]
        wanted = pattern.split("/")
        return [
            name
            for name in self._columns
            if len(parts := name.split("/")) == len(wanted) and all(a.startswith("{") or a == b for a, b in zip(wanted, parts, strict=True))
        ]

    def per(self, pattern: str) -> dict[str, Series]:
        """The metrics of a pattern by the part in its braces: `per("validation/{domain}/loss")["code"]`."""
        place = next(i for i, part in enumerate(pattern.split("/")) if part.startswith("{"))
        return {name.split("/")[place]: self.series(name) for name in self.names(pattern)}

    # Progress.

    @property
    def step(self) -> int:
        """The last step of which there is a line; 0 without any."""
        return max((int(series.steps[-1]) for name, series in self._columns.items() if len(series) and name != "time"), default=0)

    @cached_property
    def steps(self) -> int:
        """The planned steps; 0 if the stage has not started."""
        grown = [event.get("steps") for event in self.events if event["event"] in ("resume", GREW)] if self.of(GREW) else []
        if grown and isinstance(grown[-1], int):  # fewer steps of the same tokens
            return grown[-1]
        planned = [event.get("steps") for event in self.events if event["event"] in ("start", "resume")]
        return max((count for count in planned if isinstance(count, int)), default=0)

    @property
    def finished(self) -> bool:
        """Whether the stage was trained to its end."""
        return any(event["event"] == "finish" for event in self.events)

    @cached_property
    def running(self) -> bool | None:
        """Whether a process works on the run, or did when its bundle was made; None if that cannot be known, as on another machine."""
        if self.files.folder is None:
            known = read_document(self.files, INDEX).get("running")
            return known if isinstance(known, bool) else None
        holder = read_document(self.files, "lock")
        pid = holder.get("pid")
        if not isinstance(pid, int) or not 0 < pid < 1 << 31:
            return False
        return machine.is_running(pid) if holder.get("host") == socket.gethostname() else None

    @property
    def died(self) -> bool:
        """Whether the process ended without the stage's end and without a stop that was asked for: it holds the lock, and is gone."""
        return self.abandoned and not self.finished

    @cached_property
    def abandoned(self) -> bool:
        """Whether a process that is gone still holds the lock of the run, or did when its bundle was made."""
        if self.files.folder is None:
            return read_document(self.files, INDEX).get("abandoned") is True
        return self.running is False and bool(read_document(self.files, "lock").get("pid"))

    @cached_property
    def line_seconds(self) -> Series:
        """At each line, the seconds since the line before; NaN at the first of a process, and where `time` says nothing. Lines of earlier
        versions have nothing else: it falls, or jumps, where the clock is set."""
        time, elapsed = self.series("time").finite, self.series("perf/elapsed_seconds").finite
        clock = np.full(len(time), np.nan)
        clock[np.isin(time.steps, elapsed.steps)] = elapsed.values[np.isin(elapsed.steps, time.steps)]
        apart, by_time = np.diff(clock, prepend=np.nan), np.diff(time.values, prepend=np.nan)
        apart = np.where(np.isnan(apart), by_time, apart)
        number = np.searchsorted(np.sort(self.resumes), time.steps)  # a process begins after the step of its resume
        return Series(time.steps, np.where((np.diff(number, prepend=0) == 0) & (apart > 0), apart, np.nan))

    # Events and recipe.

    def of(self, *names: str) -> list[Json]:
        """The events of these names, oldest first."""
        return [event for event in self.events if event["event"] in names]

    def steps_of(self, *names: str) -> list[int]:
        """Their steps."""
        return [event["step"] for event in self.of(*names) if isinstance(event.get("step"), int)]

    @property
    def resumes(self) -> list[int]:
        """The steps at which the stage was resumed."""
        return self.steps_of("resume")

    def value(self, path: str, default: Any = None) -> Any:
        """A value of the recipe by its dotted path, such as `optimizer.learning_rate`; `default` if there is none."""
        found: Any = self.tree
        for part in path.split("."):
            if isinstance(found, dict):
                found = found.get(part)
            elif isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            else:
                return default
        return default if found is None else found

    def number(self, path: str) -> float:
        """The same, as a number: tokens, bytes, seconds or steps of a value with such a unit; NaN if it is none."""
        return quantity(self.value(path))

    def document(self, name: str) -> Json:
        """A JSON file of the run by its path, such as `corpus/report.json`; empty if there is none that can be read."""
        if name not in self._documents:
            self._documents[name] = read_document(self.files, name)
        return self._documents[name]

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.value("model.moe") is not None or self.has("experts/load_cv")

    @property
    def ranks(self) -> int:
        """Processes that trained the stage together, the most of all its starts; 1 if it is not recorded."""
        return max((event["ranks"] for event in self.of("start", "resume") if isinstance(event.get("ranks"), int)), default=1)

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computed."""
        return any(event.get("device") not in (None, "cpu") for event in self.of("start", "resume"))

    def phase_starts(self) -> list[tuple[int, str]]:
        """The steps at which phases began, with their names."""
        return [(event["step"], str(event.get("phase"))) for event in self.of("phase") if isinstance(event.get("step"), int)]


def ratio(value: float, of: float) -> float:
    """A measured number relative to another; NaN, which was not measured, relative to 0: a broken run may have zeros in any metric."""
    return value / of if of else float("nan")


def quantity(value: Any) -> float:
    """A value of a recipe as a number: tokens, bytes, seconds or steps of a text with such a unit; NaN if it is none."""
    if not isinstance(value, str):
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
    for unit in (Tokens, Bytes, Seconds):
        with suppress(ValueError):
            return float(unit.parse(value))
    with suppress(ValueError):
        if (duration := Duration.parse(value)).unit == "steps":
            return float(duration.value)
    return float("nan")


def _ascending(steps: list[int], values: list[float]) -> Series:
    """Sorted by step; of several values of a step the last, since steps that are trained again replace the former ones."""
    found = dict(zip(steps, values, strict=True))
    order = sorted(found)
    return Series(np.array(order, np.int64), np.array([found[step] for step in order], np.float64))


def stages_in(files: RunFiles) -> Iterator[Evidence]:
    """The evidence of every stage that has begun, in their order; of the first stage if none has."""
    whole = WholeRun.read(files)
    found = [
        evidence
        for stage in MODEL_STAGES
        if (evidence := Evidence(files, stage, whole)).lines or any(event.get("stage") == stage.stage for event in evidence.events)
    ]
    yield from found or [Evidence(files, BASE, whole)]
