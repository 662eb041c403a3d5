"""Losses of reinforcement learning, as functions of the log-probabilities of sampled tokens.

Shapes: B rows, T tokens, n answers in groups of G for the same prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmworks.recipe.schema.grpo import Grpo
from lmworks.train.align.answers import PackedAnswers

_EPSILON = 1e-4  # added to the standard deviation of a group


@dataclass(frozen=True)
class Sampled:
    """Log-probabilities (B, T) of the sampled tokens before the update: by the training pass, by the rollout, and by the reference."""

    old_BT: Tensor
    rollout_BT: Tensor
    reference_BT: Tensor | None = None


@dataclass(frozen=True)
class Evaluated:
    """The loss, and of all tokens the share whose ratio is clipped and the mean divergence from the reference, None without one."""

    loss: Tensor
    clipped: Tensor
    divergence: Tensor | None


def advantages(options: Grpo, rewards_n: Tensor) -> Tensor:
    """Rewards minus the mean of their group, divided by its standard deviation except for dr_grpo; (n,)."""
    groups = rewards_n.double().view(-1, options.group_size)
    centered = groups - groups.mean(1, keepdim=True)
    if options.loss != "dr_grpo":
        centered = centered / (groups.std(1, keepdim=True) + _EPSILON)
    return centered.flatten()


def policy_loss(options: Grpo, packed: PackedAnswers, logp_BT: Tensor, sampled: Sampled, advantages_n: Tensor) -> Evaluated:
    """The clipped surrogate loss of PPO (arXiv:1707.06347) on the advantages of whole answers, and the divergence from the reference.

    The ratio is that of tokens, or for gspo the geometric mean over an answer. Truncated importance sampling multiplies the loss of a
    token by the ratio of its probabilities in training and rollout, at most `importance_cap`.
    """
    mask, lengths_n = packed.mask_BT, packed.lengths()
    log_ratio_BT = (logp_BT - sampled.old_BT) * mask
    if options.loss == "gspo":
        log_ratio_BT = packed.spread(packed.sums(log_ratio_BT) / lengths_n)
    ratio_BT, advantage_BT = log_ratio_BT.exp(), packed.spread(advantages_n)
    bounded_BT = ratio_BT.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss_BT = -torch.minimum(ratio_BT * advantage_BT, bounded_BT * advantage_BT)
    clipped = ((bounded_BT * advantage_BT < ratio_BT * advantage_BT) & mask).sum() / mask.sum()
    if options.importance_cap is not None:
        loss_BT = loss_BT * (sampled.old_BT - sampled.rollout_BT).exp().clamp(max=options.importance_cap)
    divergence = None
    if sampled.reference_BT is not None:
        away_BT = (sampled.reference_BT - logp_BT) * mask
        divergence_BT = away_BT.exp() - away_BT - 1  # k3 of Schulman 2020, never negative
        loss_BT = loss_BT + options.beta * divergence_BT
        divergence = divergence_BT.detach().sum() / mask.sum()
    return Evaluated(_reduced(options, packed, loss_BT, lengths_n), clipped.detach(), divergence)


def _reduced(options: Grpo, packed: PackedAnswers, loss_BT: Tensor, lengths_n: Tensor) -> Tensor:
    """One number: the mean over tokens (dapo), over answers of the sum by a constant length (dr_grpo), or of the mean."""
    sums_n = packed.sums(loss_BT)
    if options.loss == "dapo":
        return sums_n.sum() / lengths_n.sum()
    if options.loss == "dr_grpo":
        return sums_n.sum() / (packed.count * options.max_new_tokens)
    return (sums_n / lengths_n).mean()
