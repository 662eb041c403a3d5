"""Training step by step, for a loop of your own: forward and backward, optimizer step, validate, sample, save, restore.

The steps are those of pretraining, with the trainer that `lmworks run` uses: a loop over `batch`, `forward_backward` and `optim_step`
computes the same bits, steps are judged by the same policies, and `lmworks run` resumes from what `save` writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from lmworks.api.models import Model
from lmworks.api.planning import settled_budget
from lmworks.errors import UserError
from lmworks.inference.model import for_inference
from lmworks.run.run_dir import stage_inputs, write_stamp
from lmworks.run.runner import recorded_files
from lmworks.run.stages import STAGES, StageContext, record_pretraining_text, training_context
from lmworks.run.start import choose_mesh_here, start_run
from lmworks.shards.batch import IGNORE, PADDING, Batch, fill_padding
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train.own_loop import JudgedStep, OwnLoopTrainer
from lmworks.train.pretrain import open_pretraining
from lmworks.train.step import Gradients
from lmworks.ui.terminal import Terminal
from lmworks.watch.ledger import RunLock

if TYPE_CHECKING:
    from lmworks.recipe.load import Resolved
    from lmworks.recipe.schema.recipe import Recipe


class TrainingSession:
    """A model in pretraining, its optimizer and its data, in this process. Use it as a context manager, or call `close`.

    The run directory is locked while a session is open. `step` is the next step, `steps` how many the recipe has. What was not saved is
    lost when the session closes.
    """

    def __init__(self, resolved: Resolved) -> None:
        resolved, unsettled = settled_budget(resolved)
        if unsettled:
            raise UserError("a training session needs token budgets; leave `time` out of the recipe, or run it once")
        if not resolved.recipe.trains_base:
            raise UserError("the recipe trains no base model; a training session needs phases (train.phases)")
        if grows := [phase.name for phase in resolved.recipe.train.phases if phase.loss_ramp is not None]:
            raise UserError(
                f"phase {grows[0]}: in a loop of your own no batch grows with the loss; set batch_ramp.kind to linear, or leave batch_ramp "
                "out"
            )
        start_run(resolved, Terminal(quiet=True), last="shards", allow=(), resume_command="recipe.run()")
        self.recipe: Recipe = choose_mesh_here(resolved).recipe
        assert self.recipe.run_dir
        self.path = Path(self.recipe.run_dir)
        self._gradients: Gradients | None = None
        with ExitStack() as stack:
            stack.enter_context(RunLock(self.path))
            context = StageContext(self.recipe, self.path, "recipe.run()", False, resolved.path.parent)
            record_pretraining_text(context)
            stage = next(one for one in STAGES if one.name == "pretrain")
            write_stamp(self.path / stage.folder, stage, stage_inputs(stage, self.recipe, self.path, recorded_files(self.path)))
            trainer = stack.enter_context(open_pretraining(replace(training_context(context), trainer=OwnLoopTrainer)))
            assert isinstance(trainer, OwnLoopTrainer)
            self._trainer = trainer
            stack.enter_context(self._trainer.metric_log())
            self._trainer.begin_steps()
            self._open = stack.pop_all()
        self.tokenizer = load_tokenizer(self.path / "tokenizer")

    @property
    def step(self) -> int:
        """The number of the next step; after a resume, that of the checkpoint."""
        return self._trainer.step

    @property
    def steps(self) -> int:
        """The steps of all phases."""
        return self._trainer.curriculum.steps

    def batch(self, step: int | None = None) -> Batch:
        """The batch that pretraining reads in a step, by default the next one: tokens and labels (B, T) of int32. Raises `UserError` for no
        step of the recipe."""
        step = self.step if step is None else step
        self._require_step(step)
        return self._trainer.curriculum.batch(step, 0, self._trainer.curriculum.sequences(step))

    def batch_of(self, sequences: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None) -> Batch:
        """A batch of sequences of your own, each a document of at least two ids. `weights` has a factor of the loss for each id, such as
        1 for a reply and 0 for its prompt; a negative one makes an id less likely. Raises `UserError` for ids outside the vocabulary, and
        weights that do not match."""
        rows = [np.asarray(sequence, np.int64) for sequence in sequences]
        factors = [np.ones(len(row)) for row in rows] if weights is None else [np.asarray(row, np.float64) for row in weights]
        vocabulary = int(self.recipe.model.vocab_size or 0)
        if not rows or any(row.ndim != 1 or len(row) < 2 or row.min() < 0 or row.max() >= vocabulary for row in rows):
            raise UserError(f"a batch needs sequences of at least two ids, each from 0 to {vocabulary - 1}")
        if [len(row) for row in factors] != [len(row) for row in rows] or not all(np.isfinite(row).all() for row in factors):
            raise UserError("weights need a finite number for each id of each sequence")
        length = max(map(len, rows)) - 1
        shape = (len(rows), length)
        tokens, labels = np.full(shape, PADDING, np.int32), np.full(shape, IGNORE, np.int32)
        scale = np.zeros(shape, np.float32)
        for number, (row, factor) in enumerate(zip(rows, factors, strict=True)):
            last = len(row) - 1
            tokens[number, :last], labels[number, :last] = row[:-1], np.where(factor[1:] != 0, row[1:], IGNORE)
            scale[number, :last] = factor[1:]
            fill_padding(tokens[number], last)
        begins = np.arange(0, tokens.size + 1, length, dtype=np.int32)
        plain = weights is None or set(np.unique(scale)) <= {0.0, 1.0}
        phase = 0 if self.step >= self.steps else self.batch().phase
        return Batch(tokens, labels, begins, phase, self.step, weights=None if plain else scale)

    def forward_backward(self, batch: Batch, normalizer: float | None = None) -> float:
        """Forward and backward of a batch; returns its loss in nats per token. Gradients of several calls before an `optim_step` are added.

        normalizer: what the summed loss is divided by, by default the labels of the batch. For several batches of one step, give their
        labels together (`sum(one.valid_tokens for one in batches)`), so that each label has the same weight.
        Raises `UserError` after the last step.
        """
        self._require_step(self.step)
        found = self._trainer.accumulate(batch, normalizer, first=self._gradients is None)
        if self._gradients is not None and found.normalizer != self._gradients.normalizer:
            raise UserError("the batches of a step need one normalizer: give each call the labels of all of them")
        self._gradients = found if self._gradients is None else self._gradients + found
        return float(found.sums.cross_entropy) / max(batch.valid_tokens, 1)

    def optim_step(self, learning_rate: float | None = None) -> JudgedStep:
        """Clip the gradients, update the weights, and go to the next step; returns loss, gradient norm and counts, and how the step was
        judged by `stability` of the recipe.

        The update of a bad step (a loss or a gradient norm that is not finite, or a spike) is not applied; `bad` says why. `rollback` is
        True where a run would go back to a checkpoint: call `restore`, or go on, which accepts the level after spikes as the new one. Steps
        of weighted labels are no spikes. Bad batches are saved for `lmworks replay`.

        learning_rate: in place of that of the schedule; other rates of the recipe keep their proportion to it.
        Raises `UserError` without a `forward_backward` before, and where a run would stop: after `stability.max_bad_steps` steps in a row
        that were not finite, without a checkpoint or a rollback left.
        """
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            raise UserError("there are no gradients; call forward_backward first")
        factor = None
        if learning_rate is not None:
            if not 0 <= learning_rate < float("inf"):
                raise UserError(f"learning_rate is a number from 0 on, not {learning_rate}")
            factor = learning_rate / float(self.recipe.optimizer.learning_rate or 1.0)
        return self._trainer.update(gradients, factor)

    def validate(self) -> dict[str, float]:
        """Measure the model on the held-out text of the run's validations, with averaged weights if the recipe has them. Returns the
        metrics that it logs: `validation/bits_per_byte` and `validation/loss` (nats per token) of all text, and those of each domain, such
        as `validation/DOMAIN/bits_per_byte`. A `save` after it has this value for `checkpoints.keep_best`, and early stopping counts it.

        Raises `UserError` between `forward_backward` and `optim_step`.
        """
        if self._gradients is not None:
            raise UserError("a step has begun; call optim_step before validate")
        return self._trainer.validate()

    @property
    def stops(self) -> bool:
        """Whether early stopping would end a run after the last `validate` (`train.early_stopping`); your loop decides."""
        return self._trainer.stops

    def model(self) -> Model:
        """The model with its current weights, to sample from and to measure. It shares them: ask for it again after an `optim_step`."""
        whole = self._trainer.model.whole
        assert whole is not None
        name = f"{self.recipe.name}@{self.step}"
        return Model(for_inference(whole, join=False), self.tokenizer, whole.config.max_position_embeddings, name=name)

    def save(self) -> Path:
        """Save a checkpoint; returns its folder. It can be evaluated, served and exported, and `lmworks run` resumes from it. Raises
        `UserError` if weights are not finite, or the disk is full."""
        return self._trainer.save()

    def restore(self, step: int | None = None, *, skip: bool = False) -> Path:
        """Go back to a checkpoint of this run: weights, optimizer state, position in the data, and what the policies have seen; returns its
        folder. Gradients are dropped, the metrics of later steps are cut, and later checkpoints are set aside, as by a rollback of a run.

        step: that of the checkpoint. By default the one that a step with `rollback` calls for, without the data that a run would skip; else
        the newest. skip: leave out the batches since the checkpoint, at most the last `stability.skip_steps` of them.
        Raises `UserError` if there is no good checkpoint of this step.
        """
        self._gradients = None
        return self._trainer.restore(step, skip)

    def _require_step(self, step: int) -> None:
        if not 0 <= step < self.steps:
            raise UserError(f"step {step} does not exist: the recipe has {self.steps} steps; raise the tokens of its phases")

    def close(self) -> None:
        """Close the files and release the run directory."""
        self._open.close()

    def __enter__(self) -> TrainingSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
