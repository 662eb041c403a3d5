"""Balancing of experts without an auxiliary loss: expert biases are updated once per optimizer step (Wang et al. 2024, arXiv:2408.15664).

`train_step` calls `update_biases` by way of `ParallelModel.update_biases`; the rate is `PhaseSettings.bias_update_rate`.

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmworks.model.moe import MoE
from lmworks.recipe.schema.model import Balance, Moe


def load_error(counts_LE: Tensor) -> Tensor:
    """Mean load minus load, relative to the mean; positive for underused experts. (L, E)"""
    mean = counts_LE.mean(-1, keepdim=True).clamp_min(1e-9)
    return (mean - counts_LE) / mean


@torch.no_grad()
def update_biases(layers: Sequence[MoE], counts_LE: Tensor, bias_update_rate: float, balance: Balance, apply: Tensor | None = None) -> None:
    """Move the expert biases of each MoE layer by `bias_update_rate` towards an even load; unchanged where `apply` is False.

    `counts_LE` are the tokens per expert of the whole optimizer step: all ranks and micro-batches, each token counted once.
    """
    if balance.method != "bias" or bias_update_rate == 0:
        return
    error = load_error(counts_LE.float())
    step = bias_update_rate * (error.sign() if balance.bias_update == "sign" else error.clamp(-1, 1))
    for layer, ffn in enumerate(layers):
        bias = ffn.router.bias
        moved = (bias + step[layer]).clamp(-balance.bias_clamp, balance.bias_clamp)
        bias.copy_(moved if apply is None else torch.where(apply, moved, bias))


def step_loss(shares_LE: Tensor, counts_LE: Tensor, top_k: int) -> Tensor:
    """The auxiliary loss over the whole step, summed over the tokens of which `shares` are (`router.Routing`): they are multiplied by the
    fraction of the step's tokens that chose each expert, from the counts of the whole step."""
    loads_LE = counts_LE.float() * top_k / counts_LE.sum(-1, keepdim=True).clamp_min(1)
    return (shares_LE * loads_LE).sum()


def load_statistics(counts_LE: Tensor, capacity_factor: float) -> dict[str, Tensor]:
    """Per layer (L,): coefficient of variation, largest and smallest load relative to the mean, dead experts, and the share
    of assignments beyond capacity_factor times the mean (tokens are never dropped; this says how many a capacity would drop)."""
    counts = counts_LE.float()
    mean = counts.mean(-1, keepdim=True).clamp_min(1e-9)
    ratio = counts / mean
    return {
        "cv": ratio.std(-1, unbiased=False),
        "max_ratio": ratio.amax(-1),
        "min_ratio": ratio.amin(-1),
        "dead": (counts == 0).sum(-1),
        "overflow": (ratio - capacity_factor).clamp_min(0).sum(-1) / ratio.shape[-1],
    }


def temperature(moe: Moe, step: int) -> float:
    """The routers' temperature in a step: from moe.temperature to 1, linearly over moe.temperature_steps."""
    share = min(step / moe.temperature_steps, 1.0) if moe.temperature_steps else 1.0
    return moe.temperature + (1.0 - moe.temperature) * share


@torch.no_grad()
def set_temperature(layers: Sequence[MoE], moe: Moe | None, step: int) -> None:
    """Set the router temperature of a step; does nothing without a warm-up."""
    if moe is None or not moe.temperature_steps:
        return
    for ffn in layers:
        ffn.router.temperature.fill_(temperature(moe, step))
