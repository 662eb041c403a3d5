"""Training stands still for a moment at regular intervals, outside of everything that is timed."""

from __future__ import annotations

import numpy as np

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_FACTOR, _SPREAD, _LOST = 8.0, 0.15, 0.05
_FEWEST_PAUSES, _FEWEST = 4, 40


def _check(evidence: Evidence) -> Finding | None:
    gap, seconds = evidence.series("perf/gap_seconds").finite, evidence.series("perf/step_seconds").finite
    if len(gap) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines")
    gap = gap.part(0.02, 1)
    typical = max(gap.median, 0.02 * seconds.median)
    long = gap.values > _FACTOR * typical
    pauses = gap.steps[long]
    lost = float(gap.values.sum()) / max(float(gap.values.sum()) + float((seconds.values * np.diff(seconds.steps, prepend=0)).sum()), 1e-9)
    if len(pauses) < _FEWEST_PAUSES or not lost > _LOST:
        return None
    apart = np.diff(pauses)
    spread = float(apart.std() / apart.mean())
    if spread > _SPREAD:
        return None
    length = float(np.median(gap.values[long]))
    samples = evidence.value("train.sample_every")
    return Finding(
        [
            Measurement(
                "share of the time in pauses that nothing explains", lost, high=_LOST, source="measured: at most 0.03 in healthy runs"
            ),
            Measurement(
                "spread of the intervals between them, relative to their mean", spread, low=_SPREAD, source="1 for pauses at random"
            ),
            Measurement("length of a pause", length, unit="s"),
            Measurement("steps between pauses", float(apart.mean())),
        ],
        steps=(int(pauses[0]), int(pauses[-1])),
        excluded=[
            Exclusion("slow-loader", "waiting for data is timed, and not in these pauses"),
            Exclusion("slow-saves", "saves, validations and evaluations are timed, and not in these pauses"),
        ],
        changes=[
            Change(
                "metrics.detail_every",
                "null",
                f"if the pauses are {apart.mean():.0f} steps apart because of layer statistics; samples are drawn every {samples}",
                "allowed on resume",
            )
        ],
        check_afterwards="perf/gap_seconds over two intervals",
        next_measurement="py-spy dump of the process during a pause",
    )


RULE = Rule(
    "periodic-pause",
    "Training pauses at regular intervals.",
    "machine",
    ("slow",),
    _check,
    "The time between two lines that no timer explains is recorded. Pauses with an exact period are something that happens every so many "
    "steps or seconds: garbage collection, a sampler, a hook, a cron job. In marin#9205 and torchtitan#148 Python's garbage collection "
    "held "
    "up one rank, and with it all others.",
    needs=("perf/gap_seconds", "perf/step_seconds"),
    look_alikes={"slow-loader": "a wait for data", "slow-saves": "checkpoints", "machine-oversubscribed": "no period"},
)
