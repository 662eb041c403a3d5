"""One optimizer step: micro-batches forward and backward, clip, select, update, balance.

Shapes: B sequences of a micro-batch, T time, L sparse layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmworks.model import Transformer
from lmworks.model.balance import update_biases
from lmworks.optim.clip import clip_gradients
from lmworks.optim.optimizer import Optimizer
from lmworks.optim.scaler import LossScaler
from lmworks.shards.batch import Batch


@dataclass(frozen=True)
class StepResult:
    """Means over the step's valid tokens, still on the device: nothing here has made the host wait."""

    loss: Tensor
    z_loss: Tensor
    auxiliary_loss: Tensor | None
    grad_norm: Tensor
    finite: Tensor
    counts_LE: Tensor | None
    valid_tokens: int


def train_step(
    model: Transformer, optimizer: Optimizer, batch: Batch, *,
    micro_batch: int, rate: float, clip: float, balance_rate: float, scaler: LossScaler | None = None,
) -> StepResult:  # fmt: skip
    """Update the model from one batch.

    Each micro-batch's summed loss is divided by the valid tokens of the whole step, so that how the batch is cut does not matter
    (a mean of means would weigh short documents more). Gradients add up in fp32 in `.grad`. A step whose loss or gradient norm
    is not finite changes nothing.
    """
    valid = batch.valid_tokens
    device = model.embedding.weight.device
    scale = 1.0 if scaler is None else scaler.scale
    losses, counts = [], []
    optimizer.zero_grad()
    for start in range(0, len(batch.tokens), micro_batch):
        part = batch.rows(start, min(start + micro_batch, len(batch.tokens)))
        tokens, labels, cu_seqlens = (torch.from_numpy(a).to(device, non_blocking=True) for a in (part.tokens, part.labels, part.cu_seqlens))
        loss = model.loss(tokens, labels, cu_seqlens)
        (loss.total * (scale / max(valid, 1))).backward()
        losses.append(torch.stack((loss.head.cross_entropy, loss.head.z, _detached(loss.experts.aux, device))))
        if loss.experts.counts is not None:
            counts.append(loss.experts.counts)
    if scaler is not None:
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 1 / scaler.scale)
    cross_entropy, z, auxiliary = torch.stack(losses).sum(0) / max(valid, 1)
    grad_norm = clip_gradients(model.parameters(), clip)
    finite = torch.isfinite(cross_entropy) & torch.isfinite(grad_norm)
    optimizer.step(rate, finite)
    if scaler is not None:
        scaler.update(finite)
    counts_LE = torch.stack(counts).sum(0) if counts else None
    if counts_LE is not None and model.config.moe is not None:
        update_biases(model, counts_LE, balance_rate, model.config.moe.balance, finite)
    return StepResult(cross_entropy, z, auxiliary if counts else None, grad_norm, finite, counts_LE, valid)


def _detached(value: Tensor | None, device: torch.device) -> Tensor:
    return torch.zeros((), device=device) if value is None else value.detach()
