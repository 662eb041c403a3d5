"""The memory of the process grows with every step."""

from __future__ import annotations

import math

import numpy as np

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_GROWTH, _STEADY = 0.2, 0.8
_FEWEST = 40  # lines
_SMALLEST = 64 << 20  # bytes


def _check(evidence: Evidence) -> Finding | None:
    memory = evidence.series("perf/resident_memory").finite
    restarts = evidence.resumes
    if restarts:
        memory = memory.between(max(restarts), math.inf)  # a new process begins with its own memory
    if len(memory) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines of one process")
    settled = memory.part(0.25, 1)  # buffers, caches and compiled code come in the first steps
    slope = trends.slope(settled.steps, settled.values)
    span = float(settled.steps[-1] - settled.steps[0])
    growth = ratio(slope * span, settled.first)
    parts = [settled.part(i / 8, (i + 1) / 8).median for i in range(8)]
    steady = float((np.diff(parts) > 0).mean())
    second = trends.slope(*(lambda half: (half.steps, half.values))(settled.part(0.5, 1))) / max(slope, 1e-9)
    total = evidence.series("system/memory").finite.last
    measured = [
        Measurement(
            "growth of resident memory over the last three quarters", growth, high=_GROWTH, source="measured: at most 0.01 in healthy runs"
        ),
        Measurement("share of the eighths that end higher than the one before", steady, high=_STEADY, source="0.5 for noise"),
        Measurement("slope of the second half relative to the whole", second, high=0.5, source="0 where memory settles"),
        Measurement("growth per step", slope / 1e6, unit="MB"),
    ]
    if not (growth > _GROWTH and slope * span > _SMALLEST and steady > _STEADY and second > 0.5):
        return None
    left = max(0, evidence.steps - evidence.step)
    more = slope * left / 1e9
    return Finding(
        measured,
        steps=(int(settled.steps[0]), int(settled.steps[-1])),
        excluded=[
            Exclusion("memory-fragmented", "it is memory of the host, not of the GPU"),
            Exclusion("out-of-memory-killed", "the process is not killed yet" if not evidence.died else "see there"),
        ],
        changes=[
            Change(
                advice=f"until it is mended, resume now and then: a new process begins without it; the {left:,} steps that are left "
                f"would add {more:.1f} GB to the {total / 1e9:.1f} GB in use",
                cost="a few seconds each",
            ),
            Change(
                advice="look for lists that grow in a reward, a hook or a callback of your own; py-spy and tracemalloc show what allocates"
            ),
        ],
        check_afterwards="perf/resident_memory over the next hundred steps",
        next_measurement="lmworks profile RUN, which compares two snapshots of memory",
    )


RULE = Rule(
    "memory-growing",
    "The memory of the process grows with every step.",
    "machine",
    ("out-of-memory", "hangs"),
    _check,
    "A process that keeps something of every step is killed hours later, without an error of its own (pytorch#5902, axolotl#3069). Memory "
    "that grows in the first steps and then settles is normal, and so is the page cache, which belongs to no process.",
    needs=("perf/resident_memory",),
    look_alikes={"out-of-memory-killed": "the end of it", "memory-fragmented": "memory of the GPU"},
)
