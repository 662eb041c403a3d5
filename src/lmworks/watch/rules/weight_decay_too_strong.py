"""Weight decay removes what was learned faster than it is learned."""

from __future__ import annotations

import math

from lmworks.recipe import scaling_laws
from lmworks.watch import trends
from lmworks.watch.evidence import Evidence, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_DECAY = 0.5
"""optimizer.weight_decay: published models have 0.01 to 0.1, up to 0.3 for small ones."""
_HORIZON = 0.1
"""Steps after which decay alone has halved a weight's share twice over, 1 / (rate * decay), relative to all steps (arXiv:2405.13698 finds
the best near one epoch)."""
_RATIO = 20.0
"""The fewest tokens per parameter of the runs behind the law of the best time constant (arXiv:2505.13738)."""
_UNGROWN = 1.3
"""Path of the weights over their growth. Measured on healthy runs: 0.5 to 1.22; 1.33 to 2.1 with a decay of 2 and 10."""


def _check(evidence: Evidence) -> Finding | None:
    decay, peak = evidence.number("optimizer.weight_decay"), trends.peak_rate(evidence)
    if math.isnan(decay) or math.isnan(peak):
        raise NotJudged("no optimizer.weight_decay, or no learning rate")
    if not peak * decay > 0 or trends.starts_from_weights(evidence):
        return None
    facts, weights = trends.model_facts(evidence), evidence.series("optim/weight_norm").finite
    growth = weights.last / facts.initial_norm if len(weights) else math.nan
    steps, horizon, tokens = max(evidence.steps, evidence.step), 1 / (peak * decay), trends.planned_tokens(evidence)
    best = scaling_laws.optimal_timescale(max(_RATIO, tokens / max(1, facts.hidden)) if tokens > 0 else _RATIO)
    low = _HORIZON if decay > _DECAY else best / scaling_laws.STRONG_DECAY
    if not decay > _DECAY and not horizon / steps < low:
        return None
    moved = ratio(trends.path(evidence, done=True), growth)
    found = [
        Measurement("optimizer.weight_decay", decay, high=_DECAY, source="GPT-3, Llama 3, OLMo 2, DeepSeek-V3: 0.1"),
        Measurement(
            "steps after which decay has forgotten a step, 1 / (rate * decay), over all steps",
            horizon / steps,
            low=low,
            source="arXiv:2405.13698" if decay > _DECAY else "arXiv:2505.13738",
        ),
        Measurement("path of the weights over their growth", moved, high=_UNGROWN, source="measured: make doctor"),
    ]
    if sum(one.abnormal for one in found) < 2 and evidence.step < 0.5 * steps:
        raise NotJudged("less than half of the steps are done")
    better = min(0.1, 1 / (peak * steps * best))
    return Finding(
        found,
        steps=(1, evidence.step),
        excluded=[
            Exclusion("learning-rate-too-high", f"the norm of the weights has grown {growth:.3g} times"),
            Exclusion("learning-rate-too-low", f"the weights moved by {trends.path(evidence):.2g} of their norm over all steps"),
        ],
        changes=[
            Change(
                "optimizer.weight_decay",
                f"{better:.2g}",
                cost=f"resume: the weights recover in some {min(steps, 5 * horizon):,.0f} steps; better, start again",
            )
        ],
        check_afterwards=f"optim/weight_norm rises, and held-out loss falls faster, within {max(10, round(5 * horizon)):,} steps",
        next_measurement="optim/weight_norm and optim/update_ratio: --set metrics.detail_every=5%",
    )


RULE = Rule(
    "weight-decay-too-strong",
    "Weight decay is so strong that the weights forget what they learned.",
    "optimization",
    ("not-decreasing",),
    _check,
    "With decoupled weight decay, weights are a moving average of their updates over 1 / (rate * decay) steps. Where that is a small part "
    "of the run, everything older is forgotten, attention stays uniform, and the loss stalls. In several epochs over little data more "
    "decay than usual helps; there this is only a note of the cause, so compare with a run at 0.1.",
    needs=("optim/learning_rate",),
    stages=("pretrain",),
    look_alikes={"learning-rate-too-high": "the weights grow", "learning-rate-too-low": "the weights do not move"},
)
