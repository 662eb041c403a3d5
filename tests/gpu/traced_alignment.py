"""The trainer of dpo and grpo on fake CUDA tensors, for `on_fake_cuda.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from host_waits import HostWaits
from torch._subclasses.fake_tensor import unset_fake_temporarily
from traced_steps import model_of
from traced_trainer import FILES, changed, trained

from lmworks.checkpoint.state import SINGLE_PROCESS
from lmworks.parallel.mesh import alone
from lmworks.train import answers as reference
from lmworks.train.answers import Answer, AnswerCurriculum, pack
from lmworks.train.dpo import Pairs, Preference, rows_by_step
from lmworks.train.grpo import PolicyGradient
from lmworks.train.prompts import Prompts
from lmworks.train.rewards import Reward
from lmworks.train.rollouts import Prompt, Rollout, RolloutChecks

LENGTH = 24
_COMMON: dict[str, Any] = {"learning_rate": 0.01, "sequence_length": f"{LENGTH} tokens"}
_TRAIN = {"log_every": "2 steps", **dict.fromkeys(("validate_every", "sample_every", "save_every"), "50 steps"), "micro_batch_sequences": 8}
_STEPS = 2


def steps(kind: str) -> dict[str, Any]:
    """The host waits of each of the first steps of dpo, and of grpo with two updates and a reference, and those of reference scores in
    three parts; by place."""
    return {"dpo": dpo(kind), "grpo": grpo(kind, beta=0.1, updates_per_rollout=2), "reference": [reference_pass(kind, 3)]}


def dpo(kind: str, **options: Any) -> list[dict[str, int]]:
    """The host waits of each of the first steps of dpo, whose pairs fill several rows, by place; `options` of the stage."""
    recipe = changed(kind, train=_TRAIN, dpo=_COMMON | {"data": [FILES], "pairs_per_step": 4} | options)
    assert recipe.dpo is not None
    model = model_of(recipe, alone())
    answers = _answers(80)
    labels_P = np.arange(40) % 2 == 0 if recipe.dpo.loss == "kto" else None
    with unset_fake_temporarily():  # what the host has, has values
        train = Pairs(list(zip(answers[::2], answers[1::2], strict=True)), torch.ones(40, 2).double(), labels_P, 4, 1.0, 0)
    objective = Preference(recipe.dpo, model, train, None, LENGTH, 8)
    rows = rows_by_step(train, LENGTH)
    assert min(rows) > 1
    curriculum = AnswerCurriculum("dpo", recipe, recipe.dpo, rows, lambda step: objective.packed(step).batch)
    return trained(recipe, model, curriculum, objective.validate, objective, "dpo", _STEPS)


def grpo(kind: str, **options: Any) -> list[dict[str, int]]:
    """The host waits of each of the first steps of grpo after its rollouts, which are made up; by place."""
    data = [FILES | {"reward": "exact"}]
    stage = _COMMON | {"data": data, "prompts_per_step": 4, "group_size": 2, "steps": 100, "importance_cap": 2.0}
    recipe = changed(kind, train=_TRAIN, grpo=stage | options)
    assert recipe.grpo is not None
    model = model_of(recipe, alone())
    answers = recipe.grpo.prompts_per_step * recipe.grpo.group_size
    prompts = Prompts([Prompt((1, 2), {}, 0)] * 4, [], [], {})
    blank = pack(_answers(answers), LENGTH, 0).batch  # whose rows the objective replaces
    checks = RolloutChecks(recipe.grpo, lambda *_, **__: None, is_first=False)
    objective = PolicyGradient(recipe, model, prompts, _MadeUp(), 0, checks)  # type: ignore[arg-type]
    curriculum = AnswerCurriculum("grpo", recipe, recipe.grpo, [answers] * 100, lambda step: blank)
    return trained(recipe, model, curriculum, objective.validate, objective, "grpo", _STEPS)


def reference_pass(kind: str, parts: int) -> dict[str, int]:
    """The host waits of reference scores in so many parts, by place."""
    reference.PART = 4
    model = model_of(changed(kind), alone())
    with tempfile.TemporaryDirectory() as folder, HostWaits() as seen:
        reference.reference_scores(
            model, _answers(4 * parts), Path(folder) / "scores", "key", SINGLE_PROCESS, length=LENGTH, micro_batch_size=8
        )
    return dict(seen.waits)


class _MadeUp:
    """Rollouts whose rewards differ in each group."""

    def draw(self, prompts: Sequence[Prompt], group_size: int, seed: str) -> list[list[Rollout]]:
        answers = _answers(group_size)
        return [
            [Rollout(one, np.zeros(int(one.learned.sum())), Reward(float(number % 2)), 0) for number, one in enumerate(answers)]
            for _ in prompts
        ]  # fmt: skip


def _answers(count: int) -> list[Answer]:
    """Answers of different lengths, of which two fit into a row at most."""
    lengths = [9 + number % 5 for number in range(count)]
    return [Answer(np.arange(length, dtype=np.int32) % 16, np.arange(length) >= 3) for length in lengths]
