"""Reinforcement learning without signal: all answers are right."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, Rule
from lmworks.watch.rules._groups import groups

_EQUAL, _SOLVED = 0.5, 0.85
"""A few answers that are cut make rewards of a group unequal, although there is nothing to learn from the others."""


def _check(evidence: Evidence) -> Finding | None:
    found = groups(evidence, _EQUAL)
    if found is None or not found.fate("solved") > _SOLVED:
        return None
    solved = evidence.series("grpo/solved").finite
    begun = solved.part(0, max(0.1, 1 / len(solved))).mean
    return Finding(
        [
            *found.measured("have the full reward", "solved", high=_SOLVED, equal=_EQUAL),
            Measurement("the same share in the first tenth of the steps", begun),
        ],
        steps=found.steps,
        note=begun < 0.5 * found.fate("solved"),  # it was learned
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
                moves="up",
            ),
        ],
        check_afterwards="grpo/equal_groups is below 0.75 within ten steps",
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
