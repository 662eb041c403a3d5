"""Inspects each step for faults: values that are not finite, spikes, silent corruption."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.read.batch import Batch
from lmworks.train.curriculum import Curriculum
from lmworks.train.faults.anomaly import first_non_finite
from lmworks.train.faults.handler import FaultHandler
from lmworks.train.intervals import is_due
from lmworks.train.state import TrainingState
from lmworks.train.step import micro_batch_of, seed_dropout
from lmworks.train.step_values import StepValues
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.policy import RollbackRequest
from lmworks.watch.spike import Limits


class StepInspector:
    """Judges the result of each step. `bad_steps` counts the steps of the stage that were not finite."""

    def __init__(
        self, recipe: Recipe, model: ParallelModel, curriculum: Curriculum, state: TrainingState, faults: FaultHandler,
        heartbeat: Heartbeat, recheck_interval: int | None,
    ) -> None:  # fmt: skip
        self.bad_steps = 0
        self._recipe, self._model, self._curriculum, self._state, self._faults = recipe, model, curriculum, state, faults
        self._heartbeat, self._recheck_interval = heartbeat, recheck_interval

    def inspect(
        self, step: int, values: StepValues, batch: Batch, valid_tokens: int, limits: Limits, first: str | None
    ) -> RollbackRequest | None:
        """Judge a step; the rollback that it calls for, or None. `first` is this rank's first operator with a result that is not finite,
        where it is known (`stability.detect_anomaly`)."""
        loss, norm = values.loss, values.grad_norm
        good = math.isfinite(loss) and math.isfinite(norm)
        self.bad_steps += not good
        # An overflow that a smaller scale avoids is how fp16 finds its scale, and no fault.
        if not good and math.isfinite(loss) and self._state.scaler is not None and not values.scale_exhausted:
            return None
        if not good and self._faults.policy.bad_steps.in_a_row == 0:
            self._faults.report_not_finite(step, self._find_first_non_finite(step, batch, valid_tokens) if first is None else first)
        return self._faults.policy.observe(step, loss, norm, limits, partial(self._arrays, step, batch))

    def recheck(self, step: int, batch: Batch) -> RollbackRequest | None:
        """Test for silent corruption, if it is due after this step."""
        if not is_due(step + 1, self._recheck_interval):
            return None
        return self._faults.check_corruption(step, self._model, self._state.optimizer, batch, self._micro_batch_size(batch))

    def _find_first_non_finite(self, step: int, batch: Batch, valid_tokens: int) -> str | None:
        """Run forward and backward of the step again, to find this rank's first operator with a result that is not finite."""
        self._heartbeat.beat(step, "rehearse")
        seed_dropout(self._recipe.training_seed, step, self._model.ranks.global_rank, self._model.device)
        scaler = self._state.scaler
        scale = (1.0 if scaler is None else scaler.scale) / max(valid_tokens, 1)
        return first_non_finite(self._model, batch, self._curriculum.sequences(step), self._micro_batch_size(batch), scale)

    def _micro_batch_size(self, batch: Batch) -> int:
        return micro_batch_of(self._recipe, batch.tokens.shape[1], self._model.pipeline is not None)

    def _arrays(self, step: int, batch: Batch) -> Mapping[str, np.ndarray]:
        """The whole batch of a step, for replay; `batch` is this rank's share of it."""
        if self._model.ranks.distributed:
            batch = self._curriculum.batch(step, 0, self._curriculum.sequences(step))
        return {"tokens": batch.tokens, "labels": batch.labels, "cu_seqlens": batch.cu_seqlens}

    def meta(self) -> dict[str, Any]:
        return {"bad_steps": self.bad_steps}

    def load(self, meta: Mapping[str, Any]) -> None:
        """Continue from a checkpoint with this meta."""
        self.bad_steps = int(meta["bad_steps"])
