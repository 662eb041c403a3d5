"""The run ends after so few steps that nothing but more of them can help."""

from __future__ import annotations

import math
from dataclasses import replace

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_STEPS = 100
"""AdamW's moments, the warm-up and the decay need some tens of steps each."""
_PER_PARAMETER = 0.5
"""Tokens per trained parameter. Compute-optimal: 20 (arXiv:2203.15556). Measured runs that reach a useful level here: 0.7 and more."""
_STEEP = 0.2
"""Fall of the loss over the second half of the steps, in nats per doubling. At 20 tokens per parameter: 0.05 to 0.1."""


def _check(evidence: Evidence) -> Finding | None:
    if trends.starts_from_weights(evidence):
        return None
    if not evidence.finished:
        raise NotJudged("the stage has not ended")
    facts, tokens = trends.model_facts(evidence), trends.planned_tokens(evidence)
    loss = evidence.series("train/loss").finite
    stopped = evidence.of("early_stop")
    fall = loss.part(0.4, 0.6).median - loss.part(0.9, 1).median if len(loss) >= 4 else math.nan
    found = [
        Measurement("steps of the stage", evidence.step, low=_STEPS, source="the memory of AdamW and a warm-up: some tens of steps"),
        Measurement("tokens per trained parameter", tokens / facts.parameters, low=_PER_PARAMETER, source="arXiv:2203.15556: 20"),
        Measurement("fall of train/loss over the second half of the steps", fall, high=_STEEP, source="measured: make doctor", unit="nats"),
    ]
    if not found[0].abnormal or not found[1].abnormal or stopped or loss.first > 1.05 * facts.loss:
        return None
    wanted = max(20 * facts.parameters, _STEPS * tokens / max(1, evidence.step))
    falls = "" if math.isnan(fall) else f"the loss falls by {fall:.2g} nats over the second half of "
    return Finding(
        found,
        steps=(1, evidence.step),
        excluded=[
            Exclusion("learning-rate-too-low", f"{falls}only {_counted(evidence.step)}"),
            Exclusion("schedule-ends-early", "the rate decays at the end of the steps, as planned"),
        ],
        changes=_changes(evidence, wanted, tokens),
        check_afterwards="the loss falls by less than 0.2 nats over the second half of the steps",
        next_measurement="lmworks plan RECIPE, which gives the tokens that the time allows",
    )


def _counted(steps: int) -> str:
    return f"{steps:,} step{'' if steps == 1 else 's'}"


def _changes(evidence: Evidence, wanted: float, tokens: float) -> list[Change]:
    """More tokens for each phase, in the proportions that they have."""
    phases = [evidence.number(f"train.phases.{index}.tokens") for index in range(len(evidence.value("train.phases", [])))]
    cost = f"{wanted / max(tokens, 1):,.0f} times the time of this run, from step 0, since its rate has decayed"
    more = [
        Change(f"train.phases.{index}.tokens", f"{wanted * one / sum(phases):.0f} tokens", moves="up")
        for index, one in enumerate(phases)
    ]
    return [replace(more[0], advice="20 tokens per parameter, in the proportions of the phases", cost=cost), *more[1:]]


RULE = Rule(
    "too-few-tokens",
    "The run has too few tokens: it ends after a few steps.",
    "optimization",
    ("not-decreasing",),
    _check,
    "The budget decides how far a run can come. With few steps the loss is still falling steeply when the schedule ends, and nothing else "
    "is wrong. Where the machine does not allow more, a smaller model makes more of the same time (lmworks plan).",
    needs=("train/loss",),
    stages=("pretrain",),
    look_alikes={"learning-rate-too-low": "there are many steps", "schedule-ends-early": "the rate is low for a large part of the steps"},
    outranks=("learning-rate-too-low",),
    cheap=False,
)
