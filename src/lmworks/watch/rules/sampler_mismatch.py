"""The probabilities of rollout and training differ, and the reward falls."""

from __future__ import annotations

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_MEAN, _DROP = 0.05, 0.2
_FEWEST = 20  # lines


def _check(evidence: Evidence) -> Finding | None:
    mean, reward = (evidence.series(f"grpo/{name}").finite for name in ("mismatch_mean", "reward"))
    if len(mean) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines")
    late = mean.part(0.75, 1).median
    levels = trends.binned(reward, 20)
    highest = float(levels.max())
    drop = 1 - float(levels[-2:].mean()) / max(highest, 1e-9)
    growth = late / max(mean.part(0, 0.25).median, 1e-9)
    measured = [
        Measurement(
            "mean distance of the ratio of probabilities from 1",
            late,
            high=_MEAN,
            source="chosen; measured: 0 where one model in fp32 draws and trains",
        ),
        Measurement("the same relative to the first quarter", growth, high=3.0, source="steady in healthy runs"),
        Measurement(
            "fall of grpo/reward from its highest", drop, high=_DROP, source="chosen"
        ),
    ]
    if not measured[0].abnormal:
        return None
    updates = int(evidence.number("grpo.updates_per_rollout"))
    cap = evidence.value("grpo.importance_cap")
    changes = [Change("grpo.importance_cap", "2.0", "cap the weight of such tokens", "allowed on resume")] if cap is None else []
    changes += [Change("grpo.updates_per_rollout", "1", "newer answers for each update", "allowed on resume")] if updates > 1 else []
    return Finding(
        measured,
        steps=(int(mean.steps[0]), int(mean.steps[-1])),
        excluded=[Exclusion("rewards-all-wrong", f"the reward was {highest:.3g} before")],
        changes=[
            *changes,
            Change("grpo.learning_rate", f"{evidence.number('grpo.learning_rate') / 3:.3g}", cost="roll back to before the reward fell"),
        ],
        check_afterwards="grpo/mismatch_mean stays below 0.05",
        next_measurement="grpo/reward over the next fifty steps",
    )


RULE = Rule(
    "sampler-mismatch",
    "The probabilities with which answers were drawn differ from those of training.",
    "tuning",
    ("no-reward",),
    _check,
    "The gradient weighs answers as if the model had drawn them. If the sampler has other weights, another precision or other kernels, it "
    "is biased, and the reward collapses after some hundred steps (vime#64). The distance grows before the reward falls.",
    needs=("grpo/mismatch_mean", "grpo/reward"),
    stages=("grpo",),
    look_alikes={"rewards-all-wrong": "no reward from the beginning on"},
)
