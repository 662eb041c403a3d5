"""Reinforcement learning without signal: the answers are cut before they end."""

from __future__ import annotations

import math

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Rule
from lmworks.watch.rules._groups import groups


def _check(evidence: Evidence) -> Finding | None:
    found = groups(evidence)
    if found is None or not found.fate("truncated") > 0.5:
        return None
    most = evidence.number("grpo.max_new_tokens")  # NaN without a recipe that can be read
    length = evidence.series("train/sequence_length").last
    room = "" if not length < 6 * most else f"; grpo.sequence_length ({length:.0f}) must hold the prompt too"
    return Finding(
        found.measured("are cut at grpo.max_new_tokens", "truncated"),
        steps=found.steps,
        excluded=[
            Exclusion("rewards-all-wrong", f"{found.fate('wrong', 'unparsed'):.0%} of the answers ended and are wrong"),
            Exclusion("reward-failing", f"the reward failed on {found.fate('failed'):.0%}"),
        ],
        changes=[
            Change(
                "" if math.isnan(most) else "grpo.max_new_tokens",
                f"{4 * most:.0f}",
                f"room for whole answers{room}" if most > 0 else "raise grpo.max_new_tokens",
                "allowed on resume; a step takes longer",
            ),
            Change(advice="if answers are long because the model does not stop, tune first, and see end-token-not-trained"),
        ],
        next_measurement="grpo/samples.jsonl: some answers and what they earned",
        check_afterwards="grpo/truncated is below 0.3 in the first steps",
    )


RULE = Rule(
    "answers-cut",
    "The answers are cut before they end, so none earns a reward.",
    "tuning",
    ("no-reward", "bad-answers"),
    _check,
    "An answer that reaches grpo.max_new_tokens is cut and earns nothing, whatever it was about to say. If nearly all are, the rewards "
    "of a "
    "group are equal (autocontext#1067).",
    needs=("grpo/equal_groups", "grpo/truncated"),
    stages=("grpo",),
    look_alikes={
        "rewards-all-wrong": "answers that ended",
        "reward-failing": "failed",
        "end-token-not-trained": "the model cannot stop, at any length",
    },
)
