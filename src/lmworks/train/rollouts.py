"""Rollouts: groups of answers that the live weights give, drawn by our own engine, judged, and known to all ranks.

The rollouts of a step are a function of the weights, the seed and the step, so a resumed run draws them again instead of saving them.
`RolloutChecks` tells the user of rewards that fail, and of steps that teach nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lmworks.checkpoint.communicator import Communicator
from lmworks.errors import UserError
from lmworks.host.machine import return_freed_memory
from lmworks.inference.batching import ContinuousBatch
from lmworks.inference.model import for_inference
from lmworks.inference.sampling import GenerateOptions
from lmworks.model import Transformer
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.align import ROLLOUT_ROWS, Grpo
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.answers import Answer
from lmworks.train.rewards import Drawn, Judge, Reward, score_all
from lmworks.ui import terminal

_Key = tuple[int, int]  # the number of a prompt, and of an answer to it


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids, the row that its reward reads, and the number of its reward function."""

    ids: tuple[int, ...]
    row: dict[str, Any]
    judge: int


@dataclass(frozen=True)
class Rollout:
    """A drawn answer with the log-probability of each of its tokens, by the rollout, its reward, and the number of its reward function."""

    answer: Answer
    logprobs: np.ndarray
    reward: Reward
    judge: int


class Rollouts:
    """Draws and judges answers. All ranks call its methods together; each draws for its share of the prompts."""

    def __init__(
        self, model: ParallelModel, tokenizer: Tokenizer, judges: Sequence[Judge], options: GenerateOptions, communicator: Communicator
    ) -> None:  # fmt: skip
        self._model, self._tokenizer, self._judges, self._communicator = model, tokenizer, judges, communicator
        self._options = replace(options, stop_ids=tuple(tokenizer.stop_ids))

    def draw(self, prompts: Sequence[Prompt], group_size: int, seed: str) -> list[list[Rollout]]:
        """`group_size` answers to each prompt. `seed` names their random numbers."""
        rank, size = self._communicator.rank, self._communicator.size
        mine = list(range(rank, len(prompts), size))
        with self._model.exact_logprobs():
            generator = whole_model(self._model)
            found = self._communicator.run_on_all(lambda: self.draw_share(generator, prompts, mine, group_size, seed))
        if self._model.device.type == "cpu":  # caches and a wider head, whose places the tensors of a training step do not fit into
            return_freed_memory()
        groups: dict[int, list[Rollout]] = {}
        for part in self._communicator.all_gather(found):
            groups |= part
        return [groups[number] for number in range(len(prompts))]

    def draw_share(
        self, model: Transformer, prompts: Sequence[Prompt], mine: list[int], group_size: int, seed: str
    ) -> dict[int, list[Rollout]]:  # fmt: skip
        """`draw` for this rank's prompts, by their numbers, with the weights of `model`."""
        batch = ContinuousBatch(model, max_rows=ROLLOUT_ROWS)
        rows = {
            batch.add(prompts[number].ids, self._options, _seed_of(seed, number, member)): (number, member)
            for number in mine for member in range(group_size)
        }  # fmt: skip
        ids: dict[_Key, list[int]] = {key: [] for key in rows.values()}
        logprobs: dict[_Key, list[float]] = {key: [] for key in rows.values()}
        stopped: set[_Key] = set()
        while batch.busy:
            for sampled in batch.step():
                key = rows[sampled.id]
                ids[key].append(sampled.token.id)
                logprobs[key].append(sampled.token.drawn_logprob)
                if sampled.finish == "stop":
                    stopped.add(key)
        found: dict[int, list[Rollout]] = {number: [] for number in mine}
        thinking = {number: self._tokenizer.state_of_thoughts(prompts[number].ids) == "open" for number in mine}
        drawn: dict[_Key, Drawn] = {}
        for key in sorted(ids):
            number, prompt = key[0], prompts[key[0]]
            text = self._tokenizer.decode_reply(ids[key][:-1] if key in stopped else ids[key])
            drawn[key] = Drawn(text, prompt.row, key not in stopped, thinking[number])
        rewards = self._rewards({key: (prompts[key[0]].judge, one) for key, one in drawn.items()})
        for key in sorted(ids):
            number, prompt = key[0], prompts[key[0]]
            whole = np.array([*prompt.ids, *ids[key]], np.int32)
            answer = Answer(whole, np.arange(len(whole)) >= len(prompt.ids))
            found[number].append(Rollout(answer, np.array(logprobs[key]), rewards[key], prompt.judge))
        return found

    def _rewards(self, drawn: Mapping[_Key, tuple[int, Drawn]]) -> dict[_Key, Reward]:
        """The reward of each answer; those of one data set are judged together."""
        found: dict[_Key, Reward] = {}
        for number, judge in enumerate(self._judges):
            keys = [key for key, (of, _) in drawn.items() if of == number]
            found |= zip(keys, score_all(judge, [drawn[key][1] for key in keys]), strict=True)
        return found


def _seed_of(seed: str, number: int, member: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}/{member}".encode(), digest_size=8).digest(), "little") >> 1


def whole_model(model: ParallelModel) -> Transformer:
    """The live weights in the precision of the activations, gathered one after another from all ranks, which call it together.

    On one rank, weights of this precision are shared, not copied. A copy needs room for all weights, in this precision and not in fp32, as
    long as it is used. Generation with sharded weights would gather them for each token, and all ranks would have to generate in step.
    """
    (part,) = model.parts
    return for_inference(part, model.compute_dtype, rows=ROLLOUT_ROWS)


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
            terminal.console.print(introduction + reason, style="yellow")
            self._write(event, stage="grpo", reason=reason, **fields)
        self._told.add(kind)
