"""The initial weights are too large."""

from __future__ import annotations

import math

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_FIRST = 1.05
"""First loss over ln V. Measured on healthy runs: 0.997 to 1.008; at an initializer_range of 0.2 1.09, of 0.5 1.58."""
_RANGE = 0.06
"""model.initializer_range: published models have 0.006 (DeepSeek-V3) to 0.02 (GPT-2, Llama), and small ones up to 0.05."""


def _check(evidence: Evidence) -> Finding | None:
    if trends.starts_from_weights(evidence):
        raise NotJudged("the stage starts from trained weights")
    loss = evidence.series("train/loss").finite
    facts = trends.model_facts(evidence)
    if not len(loss) or loss.steps[0] > 3:
        raise NotJudged("no loss of the first steps")
    first = loss.first / facts.loss
    rms = [
        (int(layer), one.finite.first)
        for layer, one in evidence.per("layers/{layer}/activation_rms").items()
        if layer.isdigit() and len(one.finite)
    ]
    growth = max(rms)[1] / min(rms)[1] if len(rms) > 1 and min(rms)[1] > 0 else math.nan
    found = [
        Measurement("first loss over ln V, that of a uniform guess", first, high=_FIRST, source="measured: make doctor"),
        Measurement("model.initializer_range", facts.initializer_range, high=_RANGE, source="published models: 0.006 to 0.02"),
        Measurement("activation_rms of the last layer over that of the first, in the first line of layers", growth),
    ]
    if not first > _FIRST:
        return None
    return Finding(
        found,
        steps=(int(loss.steps[0]), int(loss.steps[0])),
        excluded=[
            Exclusion("wrong-tokenizer", f"that starts at ln V = {facts.loss:.3g}; this at {loss.first:.3g}"),
            Exclusion("learning-rate-too-high", "no update came before the first loss"),
        ],
        changes=[
            Change(
                "model.initializer_range",
                f"{_better(evidence, facts.initializer_range):.3g}",
                "0.02, or less for wide models: 0.4 / sqrt(hidden_size); half of what it is where that is not less",
                cost="start again from step 0",
                moves="down",
            ),
        ],
        check_afterwards=f"the loss of step 1 is {facts.loss:.3g}, within 1%",
        next_measurement="lmworks preflight RECIPE, which compares the initial weights with the recipe's",
    )


def _better(evidence: Evidence, present: float) -> float:
    width = evidence.number("model.hidden_size")
    usual = 0.02 if not width > 400 else 0.4 / math.sqrt(width)
    return usual if usual < present else present / 2


RULE = Rule(
    "init-too-wide",
    "The initial weights are too large.",
    "optimization",
    ("not-decreasing", "spikes"),
    _check,
    "Logits of small initial weights are near zero, so the first loss is that of a uniform guess, ln V. Weights that are too large give "
    "confident wrong answers: the first loss is above that, activations grow from layer to layer, and the rate is too small relative to "
    "the weights. BLOOM's 104B predecessor diverged with a deviation of 0.02 at a width of 11,600.",
    needs=("train/loss",),
    stages=("pretrain",),
    look_alikes={
        "wrong-tokenizer": "starts at ln V",
        "learning-rate-too-high": "the first loss is ln V",
        "fp16-overflow": "the first loss is not finite",
    },
    outranks=("attention-logits-growing", "learning-rate-too-low"),
)
