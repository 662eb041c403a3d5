"""Most tokens go to few experts, and the others get none."""

from __future__ import annotations

import math

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

SETTLED = 0.2  # of the planned steps: until then a new router may be out of balance (arXiv:2408.15664, figure 3)
_CV, _MAX, _DEAD = 0.6, 0.6, 0.1
_EXPECTED = 20  # tokens per expert and step: with fewer, experts without a token are chance
_FEWEST = 10  # lines

RATE = 0.03
"""The largest healthy bias_update_rate: 30 times that of DeepSeek-V3 (0.001), three times that of small runs that balance well."""


def _check(evidence: Evidence) -> Finding | None:
    experts, chosen = evidence.number("model.moe.n_routed_experts"), evidence.number("model.moe.num_experts_per_tok")
    start = max(SETTLED * evidence.steps, 1)
    cv, busiest, dead = (evidence.series(f"experts/{name}").finite.between(start, math.inf) for name in ("load_cv", "load_max", "dead"))
    if len(cv) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines after the first {SETTLED:.0%} of the steps")
    if not evidence.series("train/batch_tokens").median * chosen / experts >= _EXPECTED:
        raise NotJudged(f"fewer than {_EXPECTED} tokens per expert and step")
    late = [one.part(0.5, 1) for one in (cv, busiest, dead)]
    layers = len(evidence.names("experts/load_cv/{layer}")) or 1
    most = experts / chosen
    measured = [
        Measurement("experts/load_cv", late[0].median, high=_CV, source="measured: 0.16 in balanced runs of make doctor"),
        Measurement("experts/load_max", late[1].median, high=max(_MAX * most, 2.0), source=f"all tokens to one expert is {most:.3g}"),
        Measurement(
            "share of experts without a token", late[2].median / (layers * experts), high=_DEAD, source="measured: 0 in balanced runs"
        ),
    ]
    if sum(one.abnormal for one in measured) < 2:
        return None
    pretraining = evidence.stage == "pretrain"
    if not pretraining and not measured[2].abnormal:
        return None  # answers of one kind go to the experts that know it, and the biases are held; measured: 2.6 of 4 in the quickstart
    method, update, clamp = (evidence.value(f"model.moe.balance.{key}") for key in ("method", "bias_update_rate", "bias_clamp"))
    bias = evidence.series("experts/bias_max").finite.last
    if method == "bias" and isinstance(update, int | float) and update > RATE and bias >= 0.95 * float(clamp or math.inf):
        return None  # bias-rate-too-high
    rate = trends.peak_rate(evidence)
    if math.isnan(rate):
        lower = Change(advice="lower the learning rate if routers collapse in the first steps")
    else:
        lower = Change(trends.rate_key(evidence), f"{rate / 3:.3g}", "if routers collapse in the first steps")
    if method in (None, "none") or not update:
        cost = "start again, or roll back to before the collapse"
        balance = Change("model.moe.balance.method", "bias", "balance the experts by a selection bias", cost)
    else:
        balance = Change("model.moe.balance.bias_update_rate", f"{min(0.01, 3 * float(update)):.3g}", "balance faster", "allowed on resume")
    return Finding(
        measured,
        steps=(int(late[0].steps[0]), int(late[0].steps[-1])),
        excluded=[Exclusion("bias-rate-too-high", f"bias_update_rate is {update}, and the largest bias {bias:.3g} of at most {clamp}")],
        changes=[balance, lower] if pretraining else [lower],
        check_afterwards=f"experts/load_cv is below 0.3 and experts/dead 0 after {SETTLED:.0%} of the steps",
    )


RULE = Rule(
    "experts-collapsed",
    "Most tokens go to few experts, and others get none.",
    "experts",
    ("experts", "not-decreasing"),
    _check,
    "A router that sends more tokens to an expert trains it more, which makes it better and attracts more tokens. Without a counterforce, "
    "which is a selection bias (arXiv:2408.15664) or an auxiliary loss, few experts do the work of all, and the model has the quality of "
    "a "
    "smaller one. A load out of balance in the first steps is normal. Reported in torchtitan#1246, #1304 and #1593: no balancing, or "
    "loads "
    "that were counted per micro-batch.",
    applies=lambda evidence: evidence.has_experts,
    needs=("experts/load_cv", "experts/load_max", "experts/dead"),
    look_alikes={"bias-rate-too-high": "a bias at its clamp, and an update rate far above 0.001"},
)
