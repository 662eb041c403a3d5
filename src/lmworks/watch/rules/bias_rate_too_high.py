"""The balancing of the experts overshoots: their selection bias moves further in one step than the scores are apart."""

from __future__ import annotations

import math

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule
from lmworks.watch.rules.experts_collapsed import RATE, SETTLED

_FEWEST = 10  # lines


def _check(evidence: Evidence) -> Finding | None:
    start = max(SETTLED * evidence.steps, 1)
    cv, bias = (evidence.series(f"experts/{name}").finite.between(start, math.inf) for name in ("load_cv", "bias_max"))
    if len(cv) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines after the first {SETTLED:.0%} of the steps")
    update = evidence.number("model.moe.balance.bias_update_rate")
    override = [one.get("bias_update_rate") for one in evidence.value("train.phases", []) if isinstance(one, dict)]
    update = max([update, *(float(rate) for rate in override if isinstance(rate, int | float))])
    clamp = evidence.number("model.moe.balance.bias_clamp")
    measured = [
        Measurement("model.moe.balance.bias_update_rate", update, high=RATE, source="0.001 in DeepSeek-V3, 0.01 in runs of make doctor"),
        Measurement("largest bias relative to its clamp", bias.part(0.5, 1).median / clamp, high=0.95, source="measured: at most 0.3"),
        Measurement("experts/load_cv", cv.part(0.5, 1).median, high=0.45, source="measured: 0.16 in balanced runs of make doctor"),
    ]
    if evidence.value("model.moe.balance.method") != "bias" or not measured[0].abnormal or not any(one.abnormal for one in measured[1:]):
        return None
    return Finding(
        measured,
        steps=(int(cv.steps[0]), int(cv.steps[-1])),
        excluded=[Exclusion("experts-collapsed", "the experts are balanced by a bias, whose update rate is the abnormal number")],
        changes=[
            Change(
                "model.moe.balance.bias_update_rate",
                "0.001" if evidence.steps >= 2000 else "0.01",
                cost="allowed on resume; the bias returns within clamp / rate steps",
                moves="down",
            )
        ],
        check_afterwards="experts/load_cv is below 0.3, and experts/bias_max below its clamp",
    )


RULE = Rule(
    "bias-rate-too-high",
    "The selection bias of the experts moves too fast, so that their load alternates.",
    "experts",
    ("experts",),
    _check,
    "The bias of an expert is raised or lowered by bias_update_rate in every step, whatever the size of the imbalance. Scores of a "
    "sigmoid "
    "router lie between 0 and 1, so a rate of 0.1 sends all tokens to an expert in one step and away from it in the next; the biases run "
    "to their clamp, and the choice of experts follows them rather than the token. DeepSeek-V3 uses 0.001, and 0 at the end.",
    applies=lambda evidence: evidence.has_experts,
    needs=("experts/load_cv", "experts/bias_max"),
    look_alikes={"experts-collapsed": "no balancing, or a normal update rate"},
)
