"""Reinforcement learning without signal: no answer earns more than another, because all are wrong."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Rule
from lmworks.watch.rules._groups import groups


def _check(evidence: Evidence) -> Finding | None:
    found = groups(evidence)
    if found is None or found.fate("wrong", "unparsed", "empty") < max(found.fate(name) for name in ("solved", "truncated", "failed")):
        return None
    unparsed = found.fate("unparsed") > found.fate("wrong")
    size = int(evidence.number("grpo.group_size"))
    return Finding(
        found.measured("are wrong", "wrong", "unparsed", "empty"),
        steps=found.steps,
        excluded=[
            Exclusion("rewards-all-right", f"{found.fate('solved'):.0%} of the answers are right"),
            Exclusion("answers-cut", f"{found.fate('truncated'):.0%} are cut"),
            Exclusion("reward-failing", f"the reward failed on {found.fate('failed'):.0%}"),
        ],
        changes=[
            Change(
                advice="tune on worked examples first, so that answers have the form that the reward reads"
                if unparsed
                else "easier prompts, or tune on worked examples first",
                cost="start the stage again",
            ),
            Change(
                "grpo.group_size",
                str(min(64, 4 * size)),
                "more answers to a prompt, of which one may be right",
                "allowed on resume; a step takes longer",
                moves="up",
            ),
            Change(
                "grpo.resample_rounds",
                "3",
                "draw other prompts instead of groups without a signal",
                "allowed on resume; a step takes longer",
                moves="up",
            ),
        ],
        next_measurement="grpo/samples.jsonl: some answers and what they earned",
        check_afterwards="grpo/equal_groups is below 0.75 within ten steps",
    )


RULE = Rule(
    "rewards-all-wrong",
    "All answers are wrong, so the rewards of a group are equal and teach nothing.",
    "tuning",
    ("no-reward",),
    _check,
    "The advantage of an answer is its reward compared with the others of its group. If all are wrong, every advantage is zero, and loss "
    "and "
    "gradient are too (ms-swift#4547, trl#3857). A loss of zero alone is normal with one update per rollout. A model learns by "
    "reinforcement "
    "only what it sometimes does already.",
    needs=("grpo/equal_groups", "grpo/wrong"),
    stages=("grpo",),
    look_alikes={"rewards-all-right": "solved", "answers-cut": "truncated", "reward-failing": "failed"},
)
