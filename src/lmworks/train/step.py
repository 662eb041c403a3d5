"""One optimizer step: micro-batches forward and backward, clip, select, update, balance.

Shapes: L sparse layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmworks.optim.optimizer import Updates
from lmworks.optim.placement import local
from lmworks.optim.scaler import LossScaler
from lmworks.parallel.model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.read.batch import Batch
from lmworks.train.ewc import Consolidation
from lmworks.watch.spike import Limits


@dataclass(frozen=True)
class StepResult:
    """Means over the step's valid tokens, on all ranks, still on the device: nothing here has made the host wait."""

    loss: Tensor
    z_loss: Tensor
    auxiliary_loss: Tensor | None
    mtp_loss: Tensor | None
    grad_norm: Tensor
    applied: Tensor
    counts_LE: Tensor | None
    valid_tokens: int


def micro_batch_of(recipe: Recipe, length: int, pipelined: bool = False) -> int:
    """Sequences of `length` tokens at a time: of all lengths as many tokens. In a pipeline many small ones keep the ranks busy, as many as
    the plan counts."""
    assert recipe.train.micro_batch_size
    if pipelined:
        return recipe.train.micro_batch_size
    return max(1, recipe.train.micro_batch_size * max(int(phase.sequence_length) for phase in recipe.train.phases) // length)


def train_step(
    model: ParallelModel, optimizer: Updates, batch: Batch, *,
    micro_batch_size: int, rate: float, clip: float, bias_update_rate: float, scaler: LossScaler | None = None,
    rows: int | None = None, valid: int | None = None, limits: Limits = Limits(), penalty: Consolidation | None = None,
) -> StepResult:  # fmt: skip
    """Update the model from one batch. Where ranks share it, `batch` is what this one reads; `rows` and `valid` are of the whole step.

    Each micro-batch's summed loss is divided by the valid tokens of the whole step, so that how the batch is cut, over micro-batches and
    over ranks, does not matter (a mean of means would weigh short documents more). Gradients add up in fp32; those of a `penalty` are
    added to their sum. A step whose loss or gradient norm is not finite, or not below its limit, changes nothing, on any rank.
    """
    rows = len(batch.tokens) if rows is None else rows
    valid = batch.valid_tokens if valid is None else valid
    scale = (1.0 if scaler is None else scaler.scale) / max(valid, 1)
    optimizer.zero_grad()
    sums = model.total(model.forward_backward(batch, rows, micro_batch_size, scale))
    if scaler is not None:
        torch._foreach_mul_([local(p.grad) for p in model.parameters() if p.grad is not None], 1 / scaler.scale)
    if penalty is not None:
        penalty.add_gradients()
    grad_norm = model.clip(clip)
    loss = sums.cross_entropy / max(valid, 1)
    finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
    applied = finite & (loss < limits.loss) & (grad_norm < limits.grad_norm)
    optimizer.step(rate, applied)
    if scaler is not None:
        scaler.update(finite)
    if sums.counts_LE is not None:
        model.balance(sums.counts_LE, bias_update_rate, applied)
    return StepResult(
        loss, sums.z / max(valid, 1), None if sums.counts_LE is None else sums.auxiliary / max(valid, 1),
        sums.mtp / max(valid, 1) if model.config.mtp else None, grad_norm, applied, sums.counts_LE, valid,
    )  # fmt: skip
