"""What a diagnosis computes again: the order of the data and the weights of a step are exact, so any batch can be replayed.

Reads the run only. One process; the model is loaded once per precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.io.run_layout import BASE
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.checkpoint_commands import find
from lmworks.run.replay import forward_backward, model_at, require_whole_weights
from lmworks.run.run_dir import require_run
from lmworks.shards.batch import IGNORE, Batch
from lmworks.shards.batches import Batches
from lmworks.train.data.mixture import read_changes
from lmworks.watch.ledger import LEDGER, Skips, read_ledger, rollbacks

ROWS = 32  # sequences of a probe: a few seconds for a small model, and a standard error of a few per cent of the loss


@dataclass
class Recomputation:
    """A run of pretraining, opened to be computed again. `step` is that of the newest checkpoint: the steps before it were trained."""

    run_dir: Path
    recipe: Recipe
    batches: Batches
    step: int
    _models: dict[tuple[int, str | None], tuple[Recipe, ParallelModel, Path]] = field(default_factory=dict)

    @classmethod
    def open(cls, run_dir: Path) -> Recomputation:
        """Raises `UserError` for a run without token files or without checkpoints of whole weights."""
        recipe = require_run(run_dir)
        require_whole_weights(recipe, BASE.stage)
        step = listing.step_of(find(run_dir, BASE.model))
        if not (run_dir / "shards" / "manifest.json").is_file():
            raise UserError(f"{run_dir} has no token files to compute a batch from; make them with: lmworks shards build RECIPE")
        return cls(run_dir, recipe, Batches(recipe, run_dir / "shards", read_changes(run_dir).all), step)

    def model(self, step: int | None = None, precision: str | None = None) -> tuple[Recipe, ParallelModel, Path]:
        """The model as it trained `step` (by default the one after the newest checkpoint), in a precision; see `model_at`."""
        step = min(self.step if step is None else step, self.batches.steps - 1)
        key = (step, precision)
        if key not in self._models:
            self._models.clear()  # one at a time: a model may fill half of the memory
            self._models[key] = model_at(self.run_dir, self.recipe, BASE.model, step, precision=precision)
        return self._models[key]

    def batch(self, step: int, rows: int | None = None) -> Batch:
        """The batch of a step, or its first rows."""
        count = self.batches.order.sequences(step)[1]
        return self.batches.batch(step, 0, count if rows is None else min(rows, count))

    def trained_steps(self, last: int) -> list[int]:
        """The last steps before the newest checkpoint that were trained, at most `last`, newest first."""
        skips = Skips(rollbacks(read_ledger(self.run_dir / LEDGER), BASE.stage))
        return [step for step in range(self.step - 1, -1, -1) if step not in skips][:last]

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
        """Of the first `rows` sequences of these steps, those with valid tokens as batches of one, each with its source."""
        left = rows
        for step in steps:
            batch, documents = self.batch(step), self.batches.documents(step)
            for number in range(min(left, len(batch.tokens))):
                if (row := batch.rows(number, number + 1)).valid_tokens:
                    yield documents[number].source, row
            left -= min(left, len(batch.tokens))
            if not left:
                return
