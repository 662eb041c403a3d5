"""What a diagnosis computes again: the order of the data and the weights of a step are exact, so any batch can be replayed.

Reads the run only. One process; the model is loaded once per precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.io.run_layout import BASE, ModelStage
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.checkpoint_commands import find
from lmworks.run.replay import forward_backward, model_at, require_next_token_loss
from lmworks.run.run_dir import require_run
from lmworks.shards.batch import IGNORE, Batch
from lmworks.shards.batches import Batches
from lmworks.shards.lineage import SequenceDocuments
from lmworks.train.curriculum import TuningCurriculum
from lmworks.train.data.mixture import read_changes
from lmworks.train.tune import held_out_conversations
from lmworks.watch.batch_growth import read_growths
from lmworks.watch.ledger import LEDGER, Skips, read_ledger, rollbacks

ROWS = 32  # sequences of a probe: a few seconds for a small model, and a standard error of a few per cent of the loss


@dataclass
class Recomputation:
    """A stage of a run, pretraining or tuning, opened to be computed again. `checkpoint` is its newest one, and `step` its step: the steps
    before it were trained."""

    run_dir: Path
    recipe: Recipe
    batches: Batches | TuningCurriculum
    checkpoint: Path
    stage: ModelStage = BASE
    _models: dict[tuple[int, str | None], tuple[Recipe, ParallelModel, Path]] = field(default_factory=dict)

    @classmethod
    def open(cls, run_dir: Path, stage: ModelStage = BASE) -> Recomputation:
        """Raises `UserError` for a stage without checkpoints or without token files, and for one with another objective than the next-token
        loss: its batches are pairs or answers, whose loss depends on a reference or on the model that sampled them."""
        recipe = require_run(run_dir)
        require_next_token_loss(stage.stage)
        checkpoint = find(run_dir, stage.model)
        data = run_dir / "shards" if stage is BASE else run_dir / stage.folder / "data"
        if not (data / "manifest.json").is_file():
            make = "lmworks shards build RECIPE" if stage is BASE else f"lmworks run RECIPE --to {stage.stage}"
            raise UserError(f"{run_dir} has no token files to compute a batch from; make them with: {make}")
        if stage is BASE:
            return cls(run_dir, recipe, Batches(recipe, data, read_changes(run_dir).all, growths=read_growths(run_dir)), checkpoint)
        return cls(run_dir, recipe, TuningCurriculum(recipe, data), checkpoint, stage)

    @property
    def step(self) -> int:
        return listing.step_of(self.checkpoint)

    def model(self, step: int | None = None, precision: str | None = None) -> tuple[Recipe, ParallelModel, Path]:
        """The model as it trained `step` (by default the one after the newest checkpoint), in a precision; see `model_at`."""
        step = min(self.step if step is None else step, self.batches.steps - 1)
        key = (step, precision)
        if key not in self._models:
            self._models.clear()  # one at a time: a model may fill half of the memory
            self._models[key] = model_at(self.run_dir, self.recipe, self.stage.model, step, precision=precision)
        return self._models[key]

    def batch(self, step: int, rows: int | None = None) -> Batch:
        """The batch of a step, or its first rows."""
        count = self.batches.order.sequences(step)[1] if isinstance(self.batches, Batches) else self.batches.sequences(step)
        return self.batches.batch(step, 0, count if rows is None else min(rows, count))

    def documents(self, step: int) -> list[SequenceDocuments]:
        """The documents of each sequence of a step of pretraining; none in tuning, whose shards do not say which row of a file each
        conversation was."""
        return self.batches.documents(step) if isinstance(self.batches, Batches) else []

    def sources_of(self, batch: Batch) -> list[str]:
        """The source of each row of a batch: empty for a blank row, and where a batch has too many sources to tell."""
        if batch.sources is None:
            return [""] * len(batch.tokens)
        names = self.batches.sources
        return [names[int(row.argmax())] if row.any() else "" for row in batch.sources]

    def trained_steps(self, last: int) -> list[int]:
        """The last steps before the newest checkpoint that were trained, at most `last`, newest first."""
        skips = Skips(rollbacks(read_ledger(self.run_dir / LEDGER), self.stage.stage))
        return [step for step in range(self.step - 1, -1, -1) if step not in skips][:last]

    def unread_rows(self, rows: int) -> Iterator[tuple[str, Batch]]:
        """At most `rows` sequences that the stage has not read: of pretraining those that come next, of tuning those that are held out.
        Raises `UserError` if there are none."""
        if isinstance(self.batches, TuningCurriculum):
            if (held_out := held_out_conversations(self.recipe, self.run_dir / self.stage.folder / "data")) is None:
                raise UserError("no conversations are held out (tune.validation_fraction)")
            batches = (held_out.batch(step) for step in range(held_out.steps))
            yield from islice(((source, row) for batch in batches for source, row in self._rows(batch)), rows)
            return
        future = list(range(self.step, min(self.step + 64, self.batches.steps)))
        if not future:
            raise UserError("the run has read all of its text; held-out text is measured by validation")
        yield from self.sampled_rows(future, rows)

    def row_losses(self, batch: Batch, step: int | None = None) -> np.ndarray:
        """The mean loss of each row of a batch, (B,) fp64, in nats per valid token, with the weights of a step (see `model`); 0 for a row
        without valid tokens."""
        _, model, _ = self.model(step)
        model.eval()
        losses = model.token_cross_entropy(batch, 8).double().numpy()
        return np.asarray(losses.sum(1) / np.maximum((batch.labels != IGNORE).sum(1), 1))

    def repeat(self, step: int, batch: Batch, precision: str | None = None) -> tuple[float, float, str | None]:
        """Forward and backward of a batch with the weights of a step: loss, gradient norm, and the first operator whose result was not
        finite. Clears the gradients first."""
        recipe, model, _ = self.model(step, precision)
        model.train()
        for parameter in model.parameters():
            parameter.grad = None
        torch.manual_seed(0)
        loss, norm, first, _ = forward_backward(model, recipe, batch)
        return loss, norm, first

    def sampled_rows(self, steps: list[int], rows: int = ROWS) -> Iterator[tuple[str, Batch]]:
        """At most `rows` sequences with valid tokens of these steps, as batches of one, each with its source."""
        yield from islice((found for step in steps for found in self._rows(self.batch(step))), rows)

    def _rows(self, batch: Batch) -> Iterator[tuple[str, Batch]]:
        for number, source in enumerate(self.sources_of(batch)):
            if (row := batch.rows(number, number + 1)).valid_tokens:
                yield source, row
