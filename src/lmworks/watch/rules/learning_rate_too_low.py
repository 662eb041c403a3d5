"""The learning rate is too low: the weights hardly move, and the loss is far from where so many steps could bring it."""

from __future__ import annotations

import math

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_PATH = 0.7
"""Path of the weights over the whole stage, in units of their norm. Measured on healthy runs from random weights: at least 1.2, also at a
third of the best rate; 0.39 at a thirtieth, 0.14 at a hundredth. It does not depend on the number of steps."""
_GROWTH = 1.3
"""Norm of the weights over its initial value at the end. Measured on healthy runs: at least 1.9; 1.07 at a thirtieth of the rate."""
_RATE = 0.1
"""The peak rate over that of the Step Law."""
_EARLIEST, _FEWEST = 0.25, 100
_MEASURED = "measured: make doctor"


def _check(evidence: Evidence) -> Finding | None:
    loss, weights = evidence.series("train/loss").finite, evidence.series("optim/weight_norm").finite
    if trends.starts_from_weights(evidence):
        raise NotJudged("trained weights need not move far")
    if evidence.steps and evidence.step < _EARLIEST * evidence.steps:
        raise NotJudged(f"less than {_EARLIEST:.0%} of the steps are done")
    if max(evidence.steps, evidence.step) < _FEWEST:
        return None  # too-few-tokens
    facts = trends.model_facts(evidence)
    path, law = trends.path(evidence), trends.rate_of_law(evidence)
    peak = trends.peak_rate(evidence)
    growth = weights.last / facts.initial_norm if len(weights) and evidence.step > 0.5 * evidence.steps else math.nan
    measured = [
        Measurement("path of the weights over all steps, in units of their norm", path, low=_PATH, source=_MEASURED),
        Measurement("optim/weight_norm over its initial value", growth, low=_GROWTH, source=_MEASURED),
        Measurement("peak rate over that of the Step Law", peak / law, low=_RATE, source="arXiv:2503.04715; measured: make doctor"),
    ]
    if not any(one.abnormal for one in measured) or loss.first > 1.05 * facts.loss or path >= _PATH or not peak > 0:
        return None
    attenuated = _attenuation(evidence, facts.parameters)
    if attenuated > 0.5:
        return None  # eps-too-large, at a normal rate
    raised = law if law > 3 * peak else peak * 10
    late = trends.slope(loss.part(0.7, 1).steps, loss.part(0.7, 1).values) * evidence.step
    return Finding(
        [*measured, Measurement("fall of train/loss in as many steps again, at its last slope", -late, unit="nats")],
        steps=(int(loss.steps[0]), evidence.step),
        excluded=[
            Exclusion("eps-too-large", f"eps takes {attenuated:.1%} of an update"),
            Exclusion("schedule-ends-early", f"the weights have moved by {path:.2g} of their norm over all steps, at the peak rate too"),
            Exclusion("too-few-tokens", f"there are {max(evidence.steps, evidence.step):,} steps"),
        ],
        changes=[
            Change("optimizer.learning_rate", f"{raised:.3g}", cost="start again: the steps so far are worth a few at the higher rate"),
            *(
                [Change("optimizer.adam_learning_rate", f"{raised:.3g}", cost="the same")]
                if evidence.value("optimizer.kind") == "muon"
                else []
            ),
        ],
        check_afterwards=f"after {max(10, evidence.steps // 10):,} steps optim/weight_norm has grown by a tenth",
        next_measurement="a line of layers, which has optim/update_ratio: --set metrics.detail_every=5%",
    )


def _attenuation(evidence: Evidence, parameters: int) -> float:
    """The share of an Adam update that eps takes away, for a gradient of the usual size; 0 under Muon, which has no eps."""
    norm = evidence.series("optim/grad_norm").median
    if evidence.value("optimizer.kind") == "muon" or math.isnan(norm):
        return 0.0
    eps, usual = evidence.number("optimizer.eps"), norm / math.sqrt(parameters)
    return eps / (eps + usual) if eps > 0 else 0.0


RULE = Rule(
    "learning-rate-too-low",
    "The learning rate is too low: the weights hardly move.",
    "optimization",
    ("not-decreasing",),
    _check,
    "From random weights, training has to move them several times as far as they are long. At a rate that is too low it ends before that: "
    "the loss falls slowly and still steeply at the last step. The measure is the sum of the relative updates over all steps, which does "
    "not depend on their number; it needs optim/update_ratio.",
    needs=("train/loss", "optim/learning_rate", "optim/update_ratio"),
    stages=("pretrain",),
    look_alikes={
        "eps-too-large": "the rate is normal, and eps exceeds the gradients",
        "schedule-ends-early": "the weights moved before the rate fell",
        "too-few-tokens": "there are few steps",
        "init-too-wide": "the first loss is far above ln V",
    },
)
