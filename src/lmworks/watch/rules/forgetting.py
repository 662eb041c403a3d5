"""A stage after pretraining makes the model worse at general text."""

from __future__ import annotations

import math

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_RISE, _RATE = 0.15, 0.5


def _check(evidence: Evidence) -> Finding | None:
    rise, general = (evidence.series(f"validation/{name}").finite for name in ("forgetting", "general_bits_per_byte"))
    if not len(rise):
        raise NotJudged("no validation of general text yet")
    allowed = evidence.number(f"{evidence.stage}.forgetting.warn_bits_per_byte")
    before = general.last - rise.last
    limit = max(allowed if math.isfinite(allowed) else 0.05, _RISE * before)
    if not rise.last > limit:
        return None
    section = evidence.stage
    rate, base = evidence.number(f"{section}.learning_rate"), evidence.number("optimizer.learning_rate")
    adapters = evidence.value(f"{section}.lora") is not None  # whose rates are about those of pretraining: the limit is of whole weights
    ratio = math.nan if adapters else rate / base
    own = evidence.series("validation/loss" if section == "tune" else "train/loss").finite
    measured = [
        Measurement(
            "rise of general text since the stage began",
            rise.last,
            high=limit,
            unit="bits per byte",
            source=f"forgetting.warn_bits_per_byte, and {_RISE:.0%} of the {before:.2f} at its beginning",
        ),
        Measurement("peak rate relative to that of pretraining", ratio, high=_RATE, source="0.1 to 0.3 in published recipes of tuning"),
        Measurement(
            "share of the validations at which it has risen further", _rising(rise.values), high=0.6, source="noise alone gives 0.5"
        ),
    ]
    changes = [Change(f"{section}.learning_rate", f"{rate / 3:.3g}", cost="start the stage again")]
    if section == "tune" and evidence.value("tune.replay") is None:
        changes.append(Change("tune.replay", "{fraction: 0.1}", "mix in text of pretraining", "start the stage again"))
    if not adapters:
        changes.append(Change(f"{section}.lora", "{rank: 16}", "train adapters instead of the weights", "start the stage again"))
    return Finding(
        measured,
        steps=(int(rise.steps[0]), int(rise.steps[-1])),
        excluded=[
            Exclusion("overfitting", f"the stage's own loss went from {own.first:.3g} to {own.last:.3g}; what rose is text of another kind")
        ]
        if len(own) > 1
        else [],
        changes=changes,
        next_measurement="validation/forgetting at the next validations: whether it goes on rising",
        check_afterwards=f"validation/forgetting stays below {limit:.2g} bits per byte at each validation",
    )


def _rising(values: object) -> float:
    import numpy as np

    moves = np.diff(np.concatenate([[0.0], np.asarray(values, float)]))
    return float((moves > 0).mean())


RULE = Rule(
    "forgetting",
    "The model forgets: general text costs more bits than before this stage.",
    "tuning",
    ("forgetting", "bad-answers"),
    _check,
    "A stage that trains on narrow text at a high rate moves the weights away from what pretraining has found. The stage's own loss does "
    "not "
    "show it. A lower rate, adapters, or a few per cent of pretraining text among the conversations prevent most of it: 1% restored a "
    "skill "
    "that tuning had lost completely (Soup#314).",
    needs=("validation/forgetting", "validation/general_bits_per_byte"),
    stages=("tune", "dpo", "grpo"),
    look_alikes={"overfitting": "the stage's own held-out loss rises", "prompt-not-masked": "the questions are trained too"},
)
