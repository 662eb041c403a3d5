"""Attention scores grow without bound at a sound learning rate."""

from __future__ import annotations

import math

import numpy as np

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_LOGITS = 100.0
"""Kimi K2 clips attention scores at 100 (arXiv:2507.20534); Dehghani et al. (arXiv:2302.05442) saw divergence above 50,000 without norms.
Measured on healthy runs: at most 52."""
_GROWTH = 1.5
"""Last quarter over second quarter of the lines. Scores that have settled do not grow."""


def _check(evidence: Evidence) -> Finding | None:
    layers = {name: one.finite for name, one in evidence.per("layers/{layer}/attention_logit_max").items() if len(one.finite) >= 4}
    if not layers:
        raise NotJudged("fewer than 4 lines of layers")
    name = max(layers, key=lambda one: layers[one].part(0.75, 1).median)
    scores = layers[name]
    last, growth = scores.part(0.75, 1).median, scores.part(0.75, 1).median / max(scores.part(0.25, 0.5).median, 1e-9)
    if not (last > _LOGITS and growth > _GROWTH):
        return None
    lowest = min((int(one) for one in layers if one.isdigit() and layers[one].part(0.75, 1).median > _LOGITS), default=-1)
    ratio = trends.peak_rate(evidence) / trends.rate_of_law(evidence)
    doubling = math.log(2) / max(trends.slope(scores.steps, np.log(np.maximum(scores.values, 1e-9))), 1e-12)
    return Finding(
        [
            Measurement(f"attention_logit_max of layer {name}", last, high=_LOGITS, source="arXiv:2507.20534"),
            Measurement("its last quarter over its second quarter", growth, high=_GROWTH, source="measured: make doctor"),
            Measurement("steps in which it doubles", doubling),
        ],
        steps=(int(scores.steps[0]), int(scores.steps[-1])),
        where=f"layers from {lowest} on" if lowest >= 0 else f"layer {name}",
        excluded=[
            Exclusion(
                "learning-rate-too-high",
                f"the peak rate is {ratio:.2g} times that of the Step Law" if ratio == ratio else "the weights have not grown",
            )
        ],
        changes=_changes(evidence),
        check_afterwards=f"attention_logit_max stays below {_LOGITS:g} in every line of layers",
        next_measurement="metrics.detail_every=1%, to see which layer grows first",
    )


def _changes(evidence: Evidence) -> list[Change]:
    """Norms bound the scores for good. MLA has no place for them, and they do not combine with the clipping of query and key weights."""
    lower = Change(trends.rate_key(evidence), f"{trends.peak_rate(evidence) / 3:.3g}", cost="resume with --allow, or start again")
    if evidence.value("model.use_qk_norm"):
        return [lower]
    if evidence.value("model.mla") is None and evidence.value("optimizer.qk_clip_threshold") is None:
        cost = "start again: the architecture changes. Clipping, skipping and other optimizers failed in marin#1368"
        return [Change("model.use_qk_norm", "true", "bound the scores by norms of queries and keys", cost=cost)]
    why = "scale down the query and key weights of a head whose scores are larger"
    return [Change("optimizer.qk_clip_threshold", f"{_LOGITS:g}", why, cost="resume with --allow", moves="down"), lower]


RULE = Rule(
    "attention-logits-growing",
    "Attention scores grow without bound.",
    "optimization",
    ("spikes",),
    _check,
    "Queries and keys can grow together until softmax has one winner in each row and passes no gradient. Spikes follow, then one without "
    "recovery; the update norm doubles before loss and gradient norm move, lower layers first (marin#1368, a 32B model). Norms of "
    "queries and keys prevent it; clipping and skipping do not.",
    needs=("layers/{layer}/attention_logit_max",),
    look_alikes={"learning-rate-too-high": "weights and activations grow as well", "init-too-wide": "the scores are large at step 1"},
)
