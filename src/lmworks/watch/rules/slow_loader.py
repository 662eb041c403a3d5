"""Training waits for its batches."""

from __future__ import annotations

import math

from lmworks.watch.evidence import Evidence, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, Rule
from lmworks.watch.rules.machine_oversubscribed import times

_SHARE = 0.2
_SECONDS = 2.0


def _check(evidence: Evidence) -> Finding | None:
    spent = times(evidence)
    waited = ratio(spent.data_wait, spent.steps)
    limit = evidence.number("stability.starved_fraction")
    limit = max(limit if math.isfinite(limit) else _SHARE, 0.1)
    if not waited > limit or spent.data_wait < _SECONDS:
        return None
    starved = evidence.of("data_starved")
    io = evidence.series("system/io_pressure").finite.part(0.1, 1).median
    rank = evidence.series("perf/starved_rank").finite
    measured = [
        Measurement(
            "share of the time of steps that waits for data",
            waited,
            high=limit,
            source="stability.starved_fraction; measured: at most 0.08 in healthy runs",
        ),
        Measurement("warnings of starvation in the ledger", len(starved), high=0, source="over windows of 50 steps"),
        Measurement("system/io_pressure", io, high=0.3, source="share of the time in which a task waits for a disk"),
    ]
    cached = evidence.value("shards.cache") is not None
    if cached:
        steps = "256 steps"
        change = Change("shards.cache.prefetch", steps, "read further ahead; or move the token files closer", "allowed on resume")
    else:
        where = "{dir: /tmp/lmworks-cache, max_bytes: 20GB}"
        change = Change("shards.cache", where, "a cache on a disk of this machine, which reads ahead", "allowed on resume")
    return Finding(
        measured,
        steps=(spent.first, spent.last),
        where=f"rank {rank.median:.0f}" if len(rank) else "",
        excluded=[Exclusion("machine-oversubscribed", f"computation had {spent.granted:.0%} of the processor time that it asked for")]
        if math.isfinite(spent.granted)
        else [],
        changes=[change, Change(advice="or put the token files on a faster disk, and leave a processor for reading", cost="resume")],
        check_afterwards="perf/data_wait is below 5% of perf/step_seconds over fifty steps",
        next_measurement="lmworks profile RUN, which shows the reads of a step",
    )


RULE = Rule(
    "slow-loader",
    "Training waits for its data.",
    "machine",
    ("slow",),
    _check,
    "Batches are read from memory-mapped token files by a thread that is ahead of training. A file system that answers slowly, a cold "
    "object store, or no processor for the thread make a step wait. The wait is timed apart from everything else in a step. Over a "
    "network, "
    "reports speak of runs that get slower with each epoch (litData#138, streaming#686).",
    needs=("perf/data_wait", "perf/step_seconds"),
    look_alikes={
        "machine-oversubscribed": "all parts of a step are slow alike, and processor time is short",
        "periodic-pause": "outside of steps",
    },
)
