"""Reinforcement learning without signal: all answers are right."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Rule
from lmworks.watch.rules._groups import groups


def _check(evidence: Evidence) -> Finding | None:
    found = groups(evidence)
    if found is None or not found.fate("solved") > 0.5:
        return None
    return Finding(
        found.measured("have the full reward", "solved"),
        steps=found.steps,
        excluded=[
            Exclusion("rewards-all-wrong", f"{found.fate('wrong', 'unparsed', 'empty'):.0%} of the answers are wrong"),
            Exclusion("reward-failing", f"the reward failed on {found.fate('failed'):.0%}"),
        ],
        changes=[
            Change(
                advice="harder prompts, or a stricter reward: read some answers first (samples.jsonl), since a reward that anything "
                "satisfies looks the same",
                cost="start the stage again",
            ),
            Change(
                "grpo.resample_rounds",
                "3",
                "draw other prompts instead of groups without a signal",
                "allowed on resume; a step takes longer",
            ),
        ],
        check_afterwards="grpo/equal_groups is below 0.9 within ten steps",
    )


RULE = Rule(
    "rewards-all-right",
    "All answers earn the full reward, so the rewards of a group are equal and teach nothing.",
    "tuning",
    ("no-reward", "too-good"),
    _check,
    "If all answers of a group are right, every advantage is zero. At the end of a stage that is its success; from the beginning on, the "
    "prompts are too easy for the model, or the reward accepts anything.",
    needs=("grpo/equal_groups", "grpo/solved"),
    stages=("grpo",),
    look_alikes={"rewards-all-wrong": "wrong", "answers-cut": "truncated", "reward-failing": "failed"},
)
