"""The tensors of a training state: model, optimizer, averaged weights, expert counts, loss scale."""

from __future__ import annotations

from typing import Any

import torch

from lmworks.optim.optimizer import Updates
from lmworks.optim.scaler import LossScaler
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.train.step import StepResult


class TrainingState:
    """Everything that a later step depends on, and that a checkpoint therefore holds. `scaler` is the loss scale of fp16, else None."""

    def __init__(self, recipe: Recipe, model: ParallelModel, optimizer: Updates) -> None:
        self._model, self.optimizer = model, optimizer
        self.scaler = LossScaler(device=model.device) if recipe.train.precision == "fp16" else None
        moe, moe_layers = model.config.moe, model.num_moe_layers
        self._expert_counts: torch.Tensor | None = None
        if moe and moe_layers:
            self._expert_counts = torch.zeros(moe_layers, moe.n_routed_experts, dtype=torch.float64, device=model.device)

    @property
    def loss_scale(self) -> float:
        """The current scale of the loss; 1 without a scaler."""
        return 1.0 if self.scaler is None else float(self.scaler.scale)

    def tensors(self, values: bool = True) -> dict[str, Any]:
        """The live tensors by kind and name; with `values` False, places to load a checkpoint into."""
        optimizer = self.optimizer.state_dict(values)
        state: dict[str, Any] = {
            "model": self._model.state_dict(values),
            "optimizer": {key: tensor for key, tensor in optimizer.items() if not key.startswith("average.")},
        }
        if self.optimizer.ema is not None:  # separate, since readers of the finished model load it without the optimizer
            state["average"] = dict(self.optimizer.ema.average)
        if self._expert_counts is not None:
            state["experts"] = {"counts": self._expert_counts}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def add_expert_counts(self, result: StepResult) -> None:
        """Add the tokens per expert of a step whose update was applied. On the device: the host does not wait."""
        if result.counts_LE is not None and self._expert_counts is not None:
            self._expert_counts += torch.where(result.applied, result.counts_LE.double(), 0.0)
