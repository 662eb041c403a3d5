"""The process gets much less processor time than it asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_GRANTED, _NOTED = 0.35, 0.7
_WAITED = 0.6  # of the time without a processor. Measured: 0.7 and more under a quota, at most 0.48 where ranks wait for each other
_FEWEST = 20  # lines
_THREADS, _WAITS = 1.5, 0.2


@dataclass(frozen=True)
class Times:
    """Sums over the lines from the second tenth on, in seconds: time in steps, waiting for data, processor time. granted: processor time
    relative to the wall time without waiting for data and saves; NaN if it was not measured, or a GPU computes."""

    steps: float
    data_wait: float
    cpu: float
    granted: float
    first: int
    last: int


def times(evidence: Evidence) -> Times:
    """Raises `NotJudged` for too few lines."""
    seconds = evidence.series("perf/step_seconds").finite
    if len(seconds) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines")
    start = int(seconds.part(0.1, 1).steps[0])  # the first steps compile and warm up
    wall = evidence.line_seconds.finite.between(start + 1, math.inf).values.sum()
    waited, saved, used = (_total(evidence, f"perf/{name}", start) for name in ("data_wait", "save_seconds", "cpu_seconds"))
    granted = math.nan if evidence.on_gpu else used / max(float(wall) - waited - saved, 1e-9)
    return Times(trends.integral(seconds, start), waited, used, granted, start, int(seconds.steps[-1]))


def _total(evidence: Evidence, name: str, start: int) -> float:
    """The sum of a metric that counts since the line before; NaN if it was not written."""
    one = evidence.series(name).finite.between(start + 1, math.inf)
    return float(one.values.sum()) if len(one) else math.nan


def _check(evidence: Evidence) -> Finding | None:
    spent = times(evidence)
    pressure, load = (evidence.series(f"system/{name}").finite.part(0.1, 1).median for name in ("cpu_pressure", "load"))
    held = evidence.series("system/throttled_seconds").finite
    throttled = float(held.between(spent.first, math.inf).values.sum()) / max(spent.steps, 1e-9) if len(held) else math.nan
    threads, cores = evidence.number("threads"), _cores(evidence)
    apart = 1 - spent.granted if math.isfinite(spent.granted) else 1.0
    measured = [
        Measurement(
            "processor time per second of computing",
            spent.granted,
            low=_GRANTED,
            source="1 on a machine of one's own, more with several threads; measured: 0.45 and more beside one other program",
        ),
        Measurement(
            "system/cpu_pressure",
            pressure,
            high=_WAITED * max(apart, 0.0),
            source="share of the time in which a task waits for a processor: 0 on a machine of one's own, and most of the time in which "
            "the process does not compute where others take it",
        ),
        Measurement("seconds that the quota of the container withheld, per second", throttled, high=0.4, source="0 without a quota"),
        Measurement("system/load", load, high=2.0, source="runnable tasks per processor; up to 1"),
        Measurement("threads per core", threads / cores, high=_THREADS, source="1: see pytorch#19825"),
    ]
    short = spent.granted < _GRANTED
    mild = spent.granted < _NOTED
    crowded = any(one.abnormal for one in measured[1:]) if math.isfinite(spent.granted) else sum(one.abnormal for one in measured) > 1
    if not crowded or (math.isfinite(spent.granted) and not mild):
        return None
    changes = [
        Change(
            advice="end the other programs of the machine, or ask for more processors (the quota of the container, "
            "launch.slurm.cpus_per_rank)",
            cost="resume",
        )
    ]
    if threads > cores:
        changes.insert(0, Change("threads", f"{int(cores)}", "as many threads as cores", "resume"))
    return Finding(
        measured,
        steps=(spent.first, spent.last),
        note=not short or spent.data_wait > _WAITS * spent.steps,
        excluded=[Exclusion("slow-loader", f"{spent.data_wait / max(spent.steps, 1e-9):.1%} of the time of steps waits for data")],
        changes=changes,
        check_afterwards="perf/cpu_seconds per second of steps is near the number of threads",
        next_measurement="perf/cpu_seconds, which versions from now on record",
    )


def _cores(evidence: Evidence) -> float:
    cores = [event.get("cores") for event in evidence.of("start", "resume")]
    return next((float(one) for one in reversed(cores) if isinstance(one, int)), math.nan)


RULE = Rule(
    "machine-oversubscribed",
    "The machine has too few processors for what runs on it.",
    "machine",
    ("slow",),
    _check,
    "Other programs, a quota of the container, or more threads than cores take processor time away. All parts of a step get slower alike, "
    "while the processor time of the process stays the same. Several processes with a thread per core each, as under a launcher that does "
    "not share the cores out, make it 2 to 10 times slower (pytorch#19825).",
    needs=("perf/step_seconds",),
    look_alikes={
        "slow-loader": "only the wait for data is long",
        "slow-rank": "one rank of several",
        "periodic-pause": "short pauses outside of steps",
    },
)
