"""Rollouts: groups of answers that the live weights give, drawn by our own engine, judged, and known to all ranks.

The rollouts of a step are a function of the weights, the seed and the step, so a resumed run draws them again instead of saving them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lmworks.allocator import return_freed_memory
from lmworks.checkpoint.communicator import Communicator
from lmworks.model import Transformer
from lmworks.model.batching import ContinuousBatch
from lmworks.model.inference import for_inference
from lmworks.model.sampling import GenerateOptions
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.grpo import ROLLOUT_ROWS
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.align.answers import Answer
from lmworks.train.align.rewards import Drawn, Judge, Reward, score_all
from lmworks.verify.thoughts import opens_thoughts

_Key = tuple[int, int]  # the number of a prompt, and of an answer to it
_PROMPT_END = 16  # tokens, in which the template may open the thoughts


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
            found = self._communicator.run_on_all(lambda: self._groups(generator, prompts, mine, group_size, seed))
        if self._model.device.type == "cpu":  # caches and a wider head, whose places the tensors of a training step do not fit into
            return_freed_memory()
        groups: dict[int, list[Rollout]] = {}
        for part in self._communicator.all_gather(found):
            groups |= part
        return [groups[number] for number in range(len(prompts))]

    def _groups(
        self, model: Transformer, prompts: Sequence[Prompt], mine: list[int], group_size: int, seed: str
    ) -> dict[int, list[Rollout]]:  # fmt: skip
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
        thinking = {number: opens_thoughts(self._tokenizer.decode(prompts[number].ids[-_PROMPT_END:])) for number in mine}
        drawn: dict[_Key, Drawn] = {}
        for key in sorted(ids):
            number, prompt = key[0], prompts[key[0]]
            text = self._tokenizer.decode(ids[key][:-1] if key in stopped else ids[key], skip_special=True)
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
