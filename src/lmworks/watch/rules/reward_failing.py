"""Reinforcement learning without signal: the reward function raises an error or runs out of time."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_FAILED = 0.2
_FEWEST = 2  # lines: a stage whose reward fails on all answers of some steps ends


def _check(evidence: Evidence) -> Finding | None:
    failed = evidence.series("grpo/failed").finite
    if len(failed) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines")
    late = failed.part(0.5, 1)
    share = late.mean
    if not share > _FAILED:
        return None
    equal = evidence.series("grpo/equal_groups").finite.part(0.5, 1).mean
    reasons = [str(event.get("reason", ""))[:120] for event in evidence.of("reward_failed")]
    return Finding(
        [
            Measurement("share of the answers on which the reward failed", share, high=_FAILED, source="0: a reward judges every answer"),
            Measurement(
                "share of the groups whose rewards are equal", equal, high=0.9, source="0.3 to 0.7 in published runs (arXiv:2503.14476)"
            ),
        ],
        steps=(int(late.steps[0]), int(late.steps[-1])),
        where=reasons[-1] if reasons else "",
        exact=True,
        excluded=[Exclusion("rewards-all-wrong", "the reward did not judge these answers")],
        changes=[
            Change(
                advice="call the reward on some answers of samples.jsonl, mend what it raises, and start the stage again",
                cost="start the stage again",
            ),
            Change("grpo.data.0.timeout", "30 s", "if it is slow rather than wrong", "allowed on resume", moves="up"),
        ],
        check_afterwards="grpo/failed is 0 in the first step",
    )


RULE = Rule(
    "reward-failing",
    "The reward raises an error or takes too long, so answers earn nothing.",
    "tuning",
    ("no-reward",),
    _check,
    "A reward of one's own that raises an error on an answer, or exceeds its time limit, counts as 0. If that happens often, the model is "
    "trained to avoid what the reward cannot read.",
    needs=("grpo/failed",),
    stages=("grpo",),
    outranks=("rewards-all-wrong",),
    look_alikes={"rewards-all-wrong": "answers that were judged", "answers-cut": "truncated"},
)
