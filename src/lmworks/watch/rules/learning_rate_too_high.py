"""The learning rate is too high: weights, activations and attention scores grow at the peak of the schedule, and the loss suffers there."""

from __future__ import annotations

import math

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_GROWTH = 10.0
"""Norm of the weights over its initial value. Measured on healthy runs: at most 6.4, and 5.8 to 7.3 at three times the best rate; 14.6 at
ten times, 29 to 33 at thirty times."""
_LOGITS = 70.0
"""Largest attention score. Measured on healthy runs without QK norm: at most 12 under Muon and 52 under AdamW; 79 at ten times the best
rate, 2,000 at thirty times. Kimi K2 clips at 100 (arXiv:2507.20534)."""
_ACTIVATIONS = 8000.0
"""RMS of a layer's output over the standard deviation of the initial weights. Measured on healthy runs: at most 5,100; 11,600 at ten times
the best rate."""
_RATE = 6.0
"""The peak rate over that of the Step Law, whose optimum is flat: three times the rate costs nothing here, ten times does."""
_RISE = 0.3
_SHORTEST = 20
_MEASURED = "measured: make doctor"


def _check(evidence: Evidence) -> Finding | None:
    loss = evidence.series("train/loss").finite
    if len(loss) < _SHORTEST:
        raise NotJudged(f"fewer than {_SHORTEST} lines with a finite train/loss")
    facts = trends.model_facts(evidence)
    peak, stop = trends.near_peak(evidence)
    first = loss.first
    if not trends.starts_from_weights(evidence) and first > 1.05 * facts.loss:
        return None  # init-too-wide: it is there before the first update
    logits = trends.highest(evidence, "layers/{layer}/attention_logit_max", peak)
    activations = trends.highest(evidence, "layers/{layer}/activation_rms", peak)
    weights = evidence.series("optim/weight_norm").finite
    growth = weights.last / facts.initial_norm if len(weights) else math.nan
    law = trends.rate_of_law(evidence)
    changed = min([step for step, _ in evidence.phase_starts() if step > peak], default=math.inf)
    smooth = trends.running_median(loss.between(peak, min(stop, changed)).values, max(25, len(loss) // 20))
    rise = float(smooth.max()) - max(first, 0.0) if len(smooth) else math.nan
    measured = [
        Measurement(
            "attention_logit_max, largest of all layers since the peak rate",
            logits,
            high=_LOGITS,
            source="arXiv:2507.20534 clips at 100; measured: make doctor",
        ),
        Measurement(
            "activation_rms, largest of all layers, over model.initializer_range",
            activations / facts.initializer_range,
            high=_ACTIVATIONS,
            source=_MEASURED,
        ),
        Measurement("optim/weight_norm over its initial value", growth, high=_GROWTH, source=_MEASURED),
        Measurement(
            "peak rate over that of the Step Law",
            trends.peak_rate(evidence) / law,
            high=_RATE,
            source="arXiv:2503.04715; measured: make doctor",
        ),
        Measurement("rise of train/loss near the peak rate above its first value", rise, high=_RISE, source=_MEASURED, unit="nats"),
    ]
    grown = logits > _LOGITS or activations / facts.initializer_range > _ACTIVATIONS
    pushed = growth > _GROWTH or trends.peak_rate(evidence) / law > _RATE
    without_layers = math.isnan(logits) and math.isnan(activations)
    if not ((grown or without_layers) and pushed) and not rise > _RISE:
        return None
    if activations / facts.initializer_range > 1e9:
        return None  # operator-overflow: no rate makes this out of sane weights
    return Finding(
        measured,
        steps=(peak, int(min(stop, evidence.step + 1)) - 1),
        excluded=[
            Exclusion("init-too-wide", f"the first loss, {first:.3g}, is that of a uniform guess, {facts.loss:.3g}"),
            *([Exclusion("no-warmup", f"attention scores of {logits:.3g} last until step {evidence.step}")] if grown else []),
        ],
        changes=_changes(evidence, law),
        check_afterwards="at the peak rate attention_logit_max is below 70, and held-out loss falls at every validation",
        next_measurement="lmworks doctor RUN --probe, which repeats a step at a lower rate; or lines of layers: metrics.detail_every=5%",
    )


def _changes(evidence: Evidence, law: float) -> list[Change]:
    rate = evidence.number(trends.rate_key(evidence))
    if math.isnan(rate):
        rate = trends.peak_rate(evidence)
    lower = law if law < rate / 3 else rate / 10
    cost = "start again from step 0: the weights have grown, and keep their size"
    found = [Change(trends.rate_key(evidence), f"{lower:.3g}", cost=cost)]
    adam = evidence.number("optimizer.adam_learning_rate")
    if evidence.stage == "pretrain" and evidence.value("optimizer.kind") == "muon" and adam > 0:
        found.append(Change("optimizer.adam_learning_rate", f"{adam * lower / rate:.3g}", cost=cost))
    return found


RULE = Rule(
    "learning-rate-too-high",
    "The learning rate is too high for this model and batch.",
    "optimization",
    ("not-decreasing", "spikes"),
    _check,
    "At a rate that is too high each step moves the weights further than the gradient is valid. Their norm grows with the steps, and with "
    "it the activations and the attention scores, until softmax has one winner and most of a layer has no gradient. Training need not "
    "diverge: the loss stalls at the peak of the schedule and falls when the rate decays, above the level of a lower rate. Three times "
    "the best rate cost nothing in our measurements, ten times cost 0.2 nats, thirty times 0.3, a hundred times 1.4.",
    needs=("train/loss", "optim/learning_rate"),
    stages=("pretrain",),
    look_alikes={
        "no-warmup": "heals at the same rate: attention scores and activations are normal later",
        "bad-batch": "one step, and the rows repeat it",
        "init-too-wide": "is there at step 0",
        "attention-logits-growing": "at a rate near the law's, and weights that have not grown",
    },
    outranks=("attention-logits-growing",),
)
