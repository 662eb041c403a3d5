"""The trainer for a loop of one's own: the caller takes the steps, and each is judged by the policies of the run (`TrainingSession`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.io.run_layout import checkpoint_name
from lmworks.shards.batch import Batch
from lmworks.train.step import Gradients, StepValues, Trained, accumulate_gradients, apply_gradients, read_values
from lmworks.train.trainer import Trainer
from lmworks.ui.terminal import Bar
from lmworks.watch.policy import Limits, RollbackRequest


@dataclass(frozen=True)
class JudgedStep(StepValues):
    """What a step has found: loss and z-loss in nats per token, the norm of the gradient before clipping, and counts (`StepValues`).

    applied: whether the weights were updated. bad: why the step is a bad one by `stability` of the recipe (a loss or a gradient norm that
    is not finite, or a spike), empty for a sound one; no update of a bad step is applied. rollback: whether a run would go back to a
    checkpoint now, as `restore` then does.
    """

    applied: bool = True
    bad: str = ""
    rollback: bool = False


class OwnLoopTrainer(Trainer):
    """Trains as `run` does, in steps that the caller takes, with what the caller asks for between them."""

    _last = 0  # the step that was trained last
    _trained: tuple[tuple[Trained, Tensor], ...] = ()  # the batches of the step, with their summed losses
    _request: RollbackRequest | None = None  # what the last step calls for

    @property
    def stops(self) -> bool:
        """Whether early stopping ends the stage."""
        return self._validator.stops

    def begin_steps(self) -> None:
        """Prepare for `accumulate` and `update`, by which a caller trains in place of `run`, inside of `metric_log`."""
        self._start()
        self._after_load()

    def _after_load(self) -> None:
        """Enter the phase of the last step before the checkpoint: the weights are measured, and sampled from, with its positions."""
        self._last = max(self.saved, 1) - 1
        self._enter_phase(self._last)

    def accumulate(self, batch: Batch, normalizer: float | None, first: bool) -> Gradients:
        """Forward and backward of a batch in place of that of the step; `first` clears the gradients before. See `train_step`."""
        self._enter_phase(self.step)
        if first:
            self._begin_step()
            self.optimizer.zero_grad()
        found = accumulate_gradients(self.model, batch, self._micro_batch(batch), normalizer=normalizer, scaler=self._state.scaler)
        trained = Trained(batch, len(batch.tokens), found.normalizer, batch)
        self._trained = (*(() if first else self._trained), (trained, found.sums.cross_entropy))
        return found

    def update(self, gradients: Gradients, lr_factor: float | None = None) -> JudgedStep:
        """Update the weights at the peak learning rates times `lr_factor` (by default the schedule's, reduced after a spike if the recipe
        says so), judge and log the step, and go to the next. Raises `UserError` where a run would not go on."""
        step, phase, policy = self.step, self._boundary.phase, self._faults.policy
        assert phase is not None
        if self._request is not None and self._request.stop is None:  # the caller has gone on: as where a run cannot go back
            policy.accept(self._last)
        self._request, self._last = None, step
        weighted = any(trained.batch.weights is not None for trained, _ in self._trained)  # their losses are no cross-entropies
        limits = Limits() if weighted else policy.limits(step, self.curriculum.steady_since(step))
        self._lr_factor = self.curriculum.lr_factor(step) * policy.lr_factor(step) if lr_factor is None else lr_factor
        result = apply_gradients(
            self.model, self.optimizer, gradients, self._lr_factor, self.recipe.optimizer.max_grad_norm, phase.bias_update_rate,
            self._state.scaler, limits, self._boundary.penalty,
        )  # fmt: skip
        self._state.add_expert_counts(result)
        found = read_values(result, self._state.scaler)
        suspect = next((trained for trained, loss in self._trained if not math.isfinite(loss)), self._trained[0][0])
        request = self._inspector.inspect(step, found, [suspect], limits, None)
        to_step = None if request is None else self._faults.target(step, phase.first_step, request)
        if request is not None and to_step is not None:
            self._request = replace(request, to_step=to_step)
        rate = self._lr_factor * float(self.recipe.optimizer.learning_rate or 0.0)
        values = {"train/loss": found.loss, "optim/grad_norm": found.grad_norm, "optim/learning_rate": rate}
        self._log.write(step + 1, {name: value for name, value in values.items() if math.isfinite(value)})
        self.step = self._next(step + 1)
        return JudgedStep(**vars(found), applied=bool(result.applied), bad=policy.fault, rollback=self._request is not None)

    def validate(self) -> dict[str, float]:
        """Validate as the run does, and log it; the metrics."""
        values = self._validator.run(self.step, self.optimizer.ema)
        self._log.write(self.step, values)
        return values

    def save(self) -> Path:
        """Save a checkpoint of the step, which `run` resumes from; returns its folder. Raises `UserError` if that fails, or if weights are
        not finite."""
        if (failure := self._save(wait=True)) is not None:
            raise failure
        if self._saver.saved != self.step:
            raise UserError(
                f"the weights after step {self.step:,} are not finite, and were not saved; open the session again to go on from the newest "
                "checkpoint"
            )
        return self.files.checkpoints.directory / checkpoint_name(self.step)

    def restore(self, step: int | None, skip: bool) -> Path:
        """Go back to the checkpoint of a step: by default as the last step calls for, else to the newest; returns its folder. `skip`:
        without the data of the steps since, at most `stability.skip_steps`. Raises `UserError` if there is no good one."""
        request = self._request if step is None else None
        if request is None:
            request = RollbackRequest(self._last, "", None, skip, self._saved_at(step))
        self._request, self.step = None, self._last  # as in a run, which goes back before it counts the step
        self._roll_back(request, Bar())
        self._after_load()
        return self.files.checkpoints.directory / checkpoint_name(self.saved)

    def _saved_at(self, step: int | None) -> int:
        checkpoints = self.files.checkpoints
        found = checkpoints.latest_good(step, self._faults.is_undone)
        if found is not None and step in (None, listing.step_of(found)):
            return listing.step_of(found)
        steps = ", ".join(str(listing.step_of(one)) for one in listing.directories(checkpoints.directory)[-8:])
        there = f"the newest are {steps}" if steps else "nothing was saved yet; call save first"
        raise UserError(f"there is no good checkpoint{'' if step is None else f' of step {step:,}'}: {there}")
