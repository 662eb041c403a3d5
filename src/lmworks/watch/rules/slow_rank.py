"""One rank is slower than the others, and all wait for it."""

from __future__ import annotations

import math

import numpy as np

from lmworks.watch.data_facts import number
from lmworks.watch.evidence import Evidence, Series
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_RATIO, _SAME = 1.25, 0.8
_FEWEST = 3  # comparisons


def _check(evidence: Evidence) -> Finding | None:
    compared = evidence.series("perf/slowest_rank").finite.part(0.1, 1)
    if len(compared) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} comparisons of ranks")
    warned = evidence.of("slow_rank")
    if warned:  # from the comparisons on that led to the first warning
        first = max(0, int(np.searchsorted(compared.steps, number(warned[0], "step"))) - (_FEWEST - 1))
        compared = Series(compared.steps[first:], compared.values[first:])
    ranks, counts = np.unique(compared.values, return_counts=True)
    rank, same = int(ranks[counts.argmax()]), float(counts.max() / len(compared))
    warned = [event for event in warned if event.get("rank") == rank]
    ratios = [number(event, "seconds") / max(number(event, "median"), 1e-9) for event in warned]
    measured = [
        Measurement(
            "share of the comparisons in which this rank held up the others most",
            same,
            high=_SAME,
            source=f"{1 / max(len(ranks), 2):.2g} by chance",
        ),
        Measurement(
            "its own time relative to the others' in the ledger's warnings",
            max(ratios, default=math.nan),
            high=_RATIO,
            source="stability.slow_threshold_mads",
        ),
    ]
    if not warned or not all(one.abnormal for one in measured):
        return None
    what = str(warned[-1].get("what", ""))
    starved = evidence.series("perf/starved_rank").finite
    waits = Series(starved.steps, (starved.values == rank).astype(float)).mean
    return Finding(
        [
            *measured,
            Measurement("share of the comparisons in which it waited longest for data", waits),
        ],
        steps=(int(compared.steps[0]), int(compared.steps[-1])),
        where=f"rank {rank}, {what}",
        excluded=[Exclusion("hung-rank", "it goes on"), Exclusion("machine-oversubscribed", "the other ranks are not slow")],
        changes=[
            Change(advice=f"lmworks health on the host of rank {rank}: clocks, throttling, other processes", cost="minutes"),
            Change(
                advice="leave the host out (--hosts without it); the run resumes on the others", cost="the steps since the last checkpoint"
            ),
        ],
        check_afterwards="perf/slowest_rank changes from line to line",
        next_measurement="lmworks profile RUN, which times the parts of a step per rank",
    )


RULE = Rule(
    "slow-rank",
    "One rank is slower than the others, which all wait for it.",
    "ranks",
    ("slow",),
    _check,
    "In a synchronous step every rank waits for the slowest one, so that their times are equal and the total time does not tell which "
    "one it "
    "is. Every twenty steps the time outside of collectives and a fixed matrix multiplication are compared. Of "
    "two ranks each is compared with its own past, so that one which is slow from the first step on is not found; nor is time that a rank "
    "loses within a step and not in arithmetic: lmworks profile times the parts of a step per rank.",
    applies=lambda evidence: evidence.ranks > 1,
    needs=("perf/slowest_rank",),
    look_alikes={
        "hung-rank": "it does not go on",
        "machine-oversubscribed": "all ranks are slow",
        "slow-loader": "all ranks wait for data",
    },
)
