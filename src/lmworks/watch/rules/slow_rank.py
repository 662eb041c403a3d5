"""One rank is slower than the others, and all wait for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lmworks.watch.data_facts import number
from lmworks.watch.evidence import Evidence, Series
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_RATIO, _SAME, _EXCESS = 1.25, 0.8, 0.25
_FEWEST = 3  # comparisons
_LONGER, _FEWEST_LINES = 1.3, 30  # steps at the end relative to those at the beginning, and lines to tell
_HEALTH = (
    Change(advice="lmworks health on the host of the rank: clocks, throttling, other processes", cost="minutes"),
    Change(advice="leave the host out (--hosts without it); the run resumes on the others", cost="the steps since the last checkpoint"),
)
_PROFILE = "lmworks profile RUN, which times the parts of a step per rank"


def _check(evidence: Evidence) -> Finding | None:
    compared = evidence.series("perf/slowest_rank").finite.part(0.1, 1)
    if len(compared) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} comparisons of ranks")
    return _warned(evidence, compared) or _from_the_start(evidence, compared) or _within_a_step(evidence, compared)


def _warned(evidence: Evidence, compared: Series) -> Finding | None:
    """A rank of which the ledger warns."""
    warned = evidence.of("slow_rank")
    if not warned:
        return None
    # from the comparisons on that led to the first warning
    first = max(0, int(np.searchsorted(compared.steps, number(warned[0], "step"))) - (_FEWEST - 1))
    compared = Series(compared.steps[first:], compared.values[first:])
    rank, measured = _same(compared)
    warned = [event for event in warned if event.get("rank") == rank]
    ratios = [number(event, "seconds") / max(number(event, "median"), 1e-9) for event in warned]
    ratio = Measurement(
        "its own time relative to the others' in the ledger's warnings",
        max(ratios, default=math.nan),
        high=_RATIO,
        source="stability.slow_threshold_mads",
    )
    if not warned or not measured.abnormal or not ratio.abnormal:
        return None
    return _named(evidence, compared, rank, [measured, ratio], f"rank {rank}, {warned[-1].get('what', '')}")


def _from_the_start(evidence: Evidence, compared: Series) -> Finding | None:
    """One of two ranks, which has no past in which it was quick, so that the ledger has no warning."""
    if evidence.ranks != 2:
        return None
    rank, measured = _same(compared)
    excess = Measurement(
        "perf/slowest_excess",
        evidence.series("perf/slowest_excess").finite.part(0.1, 1).median,
        high=_EXCESS,
        source="share of a step; near 0 for two ranks that are alike",
    )
    if not measured.abnormal or not excess.abnormal:
        return None
    return _named(evidence, compared, rank, [measured, excess], f"rank {rank} of two")


def _same(compared: Series) -> tuple[int, Measurement]:
    """The rank that is the slowest in most comparisons, and in how many."""
    ranks, counts = np.unique(compared.values, return_counts=True)
    share = Measurement(
        "share of the comparisons in which this rank held up the others most",
        float(counts.max() / len(compared)),
        high=_SAME,
        source=f"{1 / max(len(ranks), 2):.2g} by chance",
    )
    return int(ranks[counts.argmax()]), share


def _named(evidence: Evidence, compared: Series, rank: int, measured: Sequence[Measurement], where: str) -> Finding:
    starved = evidence.series("perf/starved_rank").finite
    waits = Series(starved.steps, (starved.values == rank).astype(float)).mean
    return Finding(
        [*measured, Measurement("share of the comparisons in which it waited longest for data", waits)],
        steps=(int(compared.steps[0]), int(compared.steps[-1])),
        where=where,
        excluded=[Exclusion("hung-rank", "it goes on"), Exclusion("machine-oversubscribed", "the other ranks are not slow")],
        changes=_HEALTH,
        check_afterwards="perf/slowest_rank changes from line to line",
        next_measurement=_PROFILE,
    )


def _within_a_step(evidence: Evidence, compared: Series) -> Finding | None:
    """Steps of the last phase that take longer although no rank is slow in what is compared, and nothing else has changed. No file tells
    which rank it is."""
    began = max([step for step, _ in evidence.phase_starts()] + evidence.resumes, default=0)
    seconds = evidence.series("perf/step_seconds").finite.between(began + 1, math.inf).part(0.1, 1)
    excess = evidence.series("perf/slowest_excess").finite.between(began + 1, math.inf).part(2 / 3, 1).median
    if len(seconds) < _FEWEST_LINES or not excess <= _EXCESS:
        return None
    early, late = seconds.part(0, 1 / 3), seconds.part(2 / 3, 1)
    longer = late.median / max(early.median, 1e-9)
    # nearly all of the late steps, and not some that are very long
    if longer <= _LONGER or late.share(_LONGER / 1.1 * early.median) < _SAME or _explained(evidence, early, late):
        return None
    return Finding(
        [
            Measurement("time of a step at the end of the phase relative to its beginning", longer, high=_LONGER, source="1"),
            Measurement("perf/slowest_excess", excess, high=_EXCESS, source="share of a step; near 0 for ranks that are alike"),
        ],
        steps=(int(late.steps[0]), int(late.steps[-1])),
        where="a part of the step that is not timed per rank",
        excluded=[Exclusion("slow-loader", "waiting for data explains none of it"), Exclusion("machine-oversubscribed", "no CPU pressure")],
        changes=_HEALTH[:1],
        check_afterwards="perf/step_seconds is as at the beginning of the phase",
        next_measurement=_PROFILE,
    )


def _explained(evidence: Evidence, early: Series, late: Series) -> bool:
    """Whether steps became longer for another reason: more tokens, data, the load of experts, a machine that is busy."""

    def before_and_after(name: str) -> tuple[float, float]:
        series = evidence.series(name).finite
        parts = (series.between(part.steps[0], part.steps[-1] + 1).mean for part in (early, late))
        first, last = (value if math.isfinite(value) else 0.0 for value in parts)
        return first, last

    lost = late.mean - early.mean
    names = ("train/batch_tokens", "perf/data_wait", "system/cpu_pressure", "experts/load_max")
    tokens, wait, pressure, load = map(before_and_after, names)
    spread = max(1, round(float(np.median(np.diff(late.steps)))))  # perf/data_wait is a sum since the line before
    return (
        tokens[1] > 1.05 * tokens[0]
        or (wait[1] - wait[0]) / spread > 0.3 * lost
        or pressure[1] > pressure[0] + 0.1
        or load[1] > 1.2 * load[0]
    )


RULE = Rule(
    "slow-rank",
    "One rank is slower than the others, which all wait for it.",
    "ranks",
    ("slow",),
    _check,
    "In a synchronous step every rank waits for the slowest one, so that their times are equal and the total time does not tell which "
    "one it is. Every twenty steps the time outside of collectives and a fixed matrix multiplication are compared, and the ledger warns "
    "of a rank that stands out. Of two ranks, each is compared with its own past there; one that is slow from the first step on shows "
    "in perf/slowest_excess. Time that a rank loses within a step and not in arithmetic (a slow link, slow memory) is in no file: if "
    "steps become longer and nothing explains it, the answer is not sure; if they were long from the first one on, nothing is said. "
    "lmworks profile times the parts of a step per rank.",
    applies=lambda evidence: evidence.ranks > 1,
    needs=("perf/slowest_rank",),
    look_alikes={
        "hung-rank": "it does not go on",
        "machine-oversubscribed": "all ranks are slow",
        "slow-loader": "all ranks wait for data",
    },
)
