"""The trainer on fake CUDA tensors, for `on_fake_cuda.py`."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host_waits import HostWaits
from traced_steps import batch_of, model_of, recipe_of

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.errors import UserError
from lmworks.io.run_layout import of_stage
from lmworks.optim.optimizer import build_optimizer
from lmworks.parallel.mesh import alone
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import Batch
from lmworks.train.answers import AnswerCurriculum
from lmworks.train.saving import StageFiles
from lmworks.train.step import Objective
from lmworks.train.trainer import StageSetup, Trainer
from lmworks.train.validation import validate
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import Ledger
from lmworks.watch.policy import BadSteps

STEPS = 6
END = "the trace ends here"
FILES = {"name": "a", "kind": "files", "path": "a.jsonl"}


class StepHeartbeat(Heartbeat):
    """Notes what had been found when each step began."""

    def __init__(self, seen: HostWaits) -> None:
        super().__init__(None)
        self._seen, self.found = seen, []

    def beat(self, step: int, activity: str) -> None:
        if activity == "data":
            self.found.append(Counter(self._seen.waits))


def steps(kind: str, **changes: dict[str, Any]) -> list[dict[str, int]]:
    """The host waits of each of the first steps of a run, by place. `changes`: nodes of the recipe with other values."""
    recipe = changed(kind, dpo={"data": [FILES], "learning_rate": 0.01}, **changes)
    model = model_of(recipe, alone())
    held_out = replace(batch_of(2), sequence_bytes=np.full(2, 99, np.int64))
    assert recipe.dpo is not None
    curriculum = AnswerCurriculum("traced", recipe, recipe.dpo, [1] * 100, lambda step: batch_of(1))
    return trained(recipe, model, curriculum, lambda: validate(model, {"text": [held_out] * 3}))


def changed(kind: str, **changes: dict[str, Any]) -> Recipe:
    """The recipe of a kind of model, with other values in nodes of the recipe."""
    tree = recipe_of(kind).model_dump(mode="json", exclude_unset=True)
    for name, values in changes.items():
        tree[name] = tree.get(name, {}) | values
    return Recipe.model_validate(tree)


def trained(
    recipe: Recipe, model: ParallelModel, curriculum: AnswerCurriculum, validate: Callable[[], dict[str, float]],
    objective: Objective | None = None, stage: str = "pretrain", steps: int = STEPS,
) -> list[dict[str, int]]:  # fmt: skip
    """The host waits of each of the first steps of the trainer, by place."""
    seen = HostWaits()
    heartbeat = StepHeartbeat(seen)
    rows = curriculum.batch

    def batch(step: int, start: int, stop: int) -> Batch:
        if step == steps:  # before the end, at which a checkpoint would be written
            raise UserError(END)
        return rows(step, start, stop)

    curriculum.batch = batch  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, Ledger(Path(folder) / "ledger.jsonl") as ledger:
        bad_steps = BadSteps(Path(folder), recipe.stability.max_bad_steps, 0, ledger.write)
        with Checkpoints(Path(folder) / "checkpoints", recipe.checkpoints, {}, report=ledger.write) as checkpoints:
            sampler: Any = SimpleNamespace(truncate=lambda step: None)
            files = StageFiles(Path(folder), checkpoints, ledger, bad_steps, sampler)
            trainer = Trainer(
                recipe, model, build_optimizer(model, recipe.optimizer), StageSetup(curriculum, lambda step: validate(), objective),
                files, of_stage(stage), lambda model, length, frozen: 1.0, heartbeat,
            )  # fmt: skip
            with pytest.raises(UserError, match=END), seen:
                trainer.run()
    return [dict(after - before) for before, after in zip(heartbeat.found, heartbeat.found[1:], strict=False)]
