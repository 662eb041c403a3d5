"""Preference optimization moves too far from its reference: margins grow while the model gets worse."""

from __future__ import annotations

import math

from lmworks.watch.evidence import Evidence, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_NATS, _DROP, _FORGOT = 100.0, 0.05, 0.2
_FEWEST = 8  # lines


def _check(evidence: Evidence) -> Finding | None:
    chosen, margin = evidence.series("dpo/reward_chosen").finite, evidence.series("dpo/margin").finite
    if len(chosen) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines")
    beta = evidence.number("dpo.beta")
    if not beta > 0:
        raise NotJudged("no recipe with dpo.beta, which turns rewards into log-probabilities")
    rejected = evidence.series("dpo/reward_rejected").finite
    away = max(-one.part(0.75, 1).median / beta for one in (chosen, rejected) if len(one))
    accuracy = evidence.series("validation/reward_accuracy").finite
    drop = float(accuracy.values.max() - accuracy.last) if len(accuracy) > 1 else math.nan
    general, rise = (evidence.series(f"validation/{name}").finite for name in ("general_bits_per_byte", "forgetting"))
    forgot = ratio(rise.last, general.last - rise.last) if len(rise) else math.nan
    measured = [
        Measurement(
            "fall of the log-probability of an answer since the start",
            away,
            high=_NATS,
            unit="nats",
            source="measured: 39 in healthy runs of make doctor",
        ),
        Measurement("fall of validation/reward_accuracy from its highest", drop, high=_DROP, source="two standard errors of 200 pairs"),
        Measurement(
            "rise of general text relative to its beginning", forgot, high=_FORGOT, source="measured: 0.004 in healthy runs of make doctor"
        ),
        Measurement("dpo/margin in the last quarter", margin.part(0.75, 1).median),
    ]
    if not measured[0].abnormal:
        return None
    rate = evidence.number("dpo.learning_rate")
    return Finding(
        measured,
        steps=(int(chosen.steps[0]), int(chosen.steps[-1])),
        excluded=[Exclusion("forgetting", f"answers of the pairs themselves have become less likely by {away:.0f} nats")],
        changes=[
            Change("dpo.learning_rate", f"{rate / 10:.3g}", cost="start the stage again"),
            Change("dpo.beta", f"{max(0.1, 3 * beta):.3g}", "a stronger pull to the reference", "start the stage again"),
            *([Change("dpo.epochs", "1", cost="start the stage again")] if evidence.number("dpo.epochs") > 1 else []),
        ],
        check_afterwards="dpo/reward_chosen stays above -3, and validation/reward_accuracy rises until the end",
        next_measurement="validation/forgetting, which needs a validation during the stage",
    )


RULE = Rule(
    "dpo-over-optimized",
    "Preference optimization has moved too far from its reference.",
    "tuning",
    ("bad-answers", "forgetting"),
    _check,
    "The loss only asks for a margin between two answers. At a high rate or a small beta it is reached by making both far less likely, "
    "and "
    "with them everything else. A reward of the chosen answers that falls is normal (DPO#8, trl#800) while held-out accuracy rises and "
    "general text costs what it did; a fall by tens of nats with accuracy or general text getting worse is not.",
    needs=("dpo/reward_chosen", "dpo/margin"),
    stages=("dpo",),
    outranks=("forgetting",),
    look_alikes={"forgetting": "general text gets worse, while the chosen answers do not"},
)
