"""Steps take longer because the busiest expert gets more tokens."""

from __future__ import annotations

import numpy as np

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_LOAD, _SLOWER, _TOGETHER = 1.5, 0.15, 0.6
_FEWEST = 60  # lines


def _check(evidence: Evidence) -> Finding | None:
    load, seconds = evidence.series("experts/load_max").finite.part(0.1, 1), evidence.series("perf/step_seconds").finite.part(0.1, 1)
    if len(load) < _FEWEST or len(load) != len(seconds):
        raise NotJudged(f"fewer than {_FEWEST} lines")
    a, b = trends.binned(load), trends.binned(seconds)
    together = float(np.corrcoef(_ranks(a), _ranks(b))[0, 1]) if a.std() and b.std() else 0.0
    slow, quick = load.values >= np.quantile(load.values, 0.8), load.values <= np.quantile(load.values, 0.2)
    slower = float(np.median(seconds.values[slow]) / np.median(seconds.values[quick])) - 1
    measured = [
        Measurement(
            "experts/load_max in its highest fifth",
            float(np.median(load.values[slow])),
            high=_LOAD,
            source="measured: 1.3 in balanced runs of make doctor",
        ),
        Measurement(
            "time of the steps in it relative to the lowest fifth, minus 1",
            slower,
            high=_SLOWER,
            source="chosen: above the noise of step times",
        ),
        Measurement(
            "rank correlation of load and time of a step", together, high=_TOGETHER, source="0 where time does not depend on the load"
        ),
    ]
    if not all(one.abnormal for one in measured):
        return None
    rate = evidence.number("model.moe.balance.bias_update_rate")
    return Finding(
        measured,
        steps=(int(load.steps[0]), int(load.steps[-1])),
        excluded=[Exclusion("machine-oversubscribed", "the time of a step follows the load of its experts")],
        changes=[
            Change("model.moe.balance.bias_update_rate", f"{min(0.03, max(0.001, 3 * rate)):.3g}", "balance faster", "allowed on resume"),
            Change("layout.ep", "1", "experts on one rank do not wait for each other", "resume; more memory per rank"),
        ],
        check_afterwards="perf/step_seconds, once experts/load_max is below 1.5",
    )


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


RULE = Rule(
    "expert-imbalance-slow",
    "Steps are slow because few experts do most of the work.",
    "experts",
    ("slow", "experts"),
    _check,
    "Where experts are on several ranks, a step waits for the rank whose experts got most tokens; so time follows the load of the busiest "
    "expert, up to the number of ranks times as long (verl#4103).",
    applies=lambda evidence: evidence.has_experts,
    needs=("experts/load_max", "perf/step_seconds"),
    look_alikes={"machine-oversubscribed": "time does not follow the load", "experts-collapsed": "experts without a token"},
)
