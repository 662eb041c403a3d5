"""What the user is told about the rollouts of a step: rewards that fail, and steps that teach nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lmworks import progress
from lmworks.errors import UserError
from lmworks.recipe.schema.grpo import Grpo
from lmworks.train.align.rollouts import Rollout

_FAILED_STEPS = 3  # in a row, after which the run stops


def differs(group: Sequence[Rollout]) -> bool:
    """Whether the rewards of a group differ: otherwise all advantages are 0."""
    return len({one.reward.value for one in group}) > 1


class RolloutChecks:
    """Reports the first failure of the reward of each data set, and the first step without a learning signal of each kind, to the terminal
    and through `write`, which appends an event to the ledger. All ranks call it alike, and `is_first` reports."""

    def __init__(self, options: Grpo, write: Callable[..., None], is_first: bool) -> None:
        self._options, self._write, self._is_first = options, write, is_first
        self._told: set[str] = set()
        self._failed_steps = 0

    def check(self, step: int, drawn: Sequence[Sequence[Rollout]]) -> dict[str, float]:
        """The metric of a step's signal. Raises `UserError` when every judged answer of so many steps in a row has failed."""
        answers = [one for group in drawn for one in group]
        failures = [one for one in answers if one.reward.outcome == "failed"]
        for one in failures:
            name = self._options.data[one.judge].name
            self._tell(
                f"failed {name}", "reward_failed", f"grpo.data.{name}: the reward failed at step {step}, so that the answer earns 0: ",
                one.reward.detail, step=step, data=name,
            )  # fmt: skip
        shown = sum(one.reward.outcome not in ("empty", "truncated") for one in answers)
        if shown:
            self._failed_steps = self._failed_steps + 1 if len(failures) == shown else 0
        if self._failed_steps == _FAILED_STEPS:
            name = self._options.data[failures[0].judge].name
            raise UserError(
                f"grpo.data.{name}: the reward failed on every answer of {_FAILED_STEPS} steps in a row, last with "
                f"{failures[0].reward.detail}; correct it and run the command again"
            )
        idle = not any(map(differs, drawn))
        if idle:
            kind, reason = self._why(answers)
            self._tell(kind, "no_signal", f"grpo: step {step} teaches nothing: ", reason, step=step)
        return {"grpo/no_signal": float(idle)}

    def _why(self, answers: Sequence[Rollout]) -> tuple[str, str]:
        """Why no group has a difference, and the remedy."""
        outcomes, most = {one.reward.outcome for one in answers}, self._options.max_new_tokens
        if outcomes == {"truncated"}:
            return "truncated", (
                f"all {len(answers)} answers were cut at grpo.max_new_tokens {most} and earn 0; raise it, and grpo.sequence_length with it"
            )
        if outcomes == {"failed"}:
            return "failed", "the reward failed on all answers; correct it"
        if "unparsed" in outcomes and outcomes <= {"unparsed", "empty", "truncated"}:
            return "unparsed", (
                f"in none of {len(answers)} answers was one found that the reward can read; ask for its form in the prompts ('end with: "
                "The answer is NUMBER', or \\boxed{}), and look at some answers in samples.jsonl"
            )
        mean = float(np.mean([one.reward.value for one in answers]))
        task = "harder" if mean >= 0.5 else "easier"
        parsed = sum(one.reward.outcome == "judged" for one in answers)
        return "equal", (
            f"the answers to each prompt earned the same (mean {mean:g}; {parsed} of {len(answers)} were read); use {task} prompts, a "
            "larger grpo.group_size or grpo.temperature, or grpo.resample_rounds"
        )

    def _tell(self, kind: str, event: str, introduction: str, reason: str, **fields: object) -> None:
        """Once for each kind."""
        if kind not in self._told and self._is_first:
            progress.console.print(introduction + reason, style="yellow")
            self._write(event, stage="grpo", reason=reason, **fields)
        self._told.add(kind)
