"""Losses of preference pairs, as functions of the summed log-probabilities of the answers.

Shapes: P pairs; column 0 is the chosen answer and column 1 the rejected one, or for kto the answer and another row's answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.recipe.schema.dpo import Dpo


@dataclass(frozen=True)
class Scored:
    """The mean loss, and the rewards of chosen and rejected answers, which are what the metrics are made of. `accuracy`: share of pairs
    whose chosen answer has the larger reward, a tie counting as half. `divergence`: kto's estimate, else None."""

    loss: Tensor
    chosen: Tensor
    rejected: Tensor
    accuracy: Tensor
    divergence: Tensor | None = None


def needs_reference(options: Dpo) -> bool:
    """Whether the loss compares with the model that the stage starts from."""
    return options.loss != "simpo"


def preference_loss(
    options: Dpo, logp_P2: Tensor, reference_P2: Tensor | None, lengths_P2: Tensor, labels_P: Tensor | None = None
) -> Scored:
    """The mean loss over the pairs. `logp_P2` and `reference_P2` are summed over each answer's tokens, of which there are `lengths_P2`;
    `labels_P` (bool) says for kto which answers are good."""
    match options.loss:
        case "kto":
            assert reference_P2 is not None and labels_P is not None
            return _kto(options, logp_P2, reference_P2, labels_P)
        case "simpo":
            rewards_P2 = options.beta * logp_P2 / lengths_P2
            losses = _sigmoid(rewards_P2[:, 0] - rewards_P2[:, 1] - options.simpo_gamma, options.label_smoothing)
        case "ipo":
            assert reference_P2 is not None
            ratio_P2 = logp_P2 - reference_P2
            mean_P2 = ratio_P2 / lengths_P2  # per token, as the authors do it: otherwise the loss grows with the square of the length
            losses = (mean_P2[:, 0] - mean_P2[:, 1] - 1 / (2 * options.beta)).square()
            rewards_P2 = options.beta * ratio_P2
        case _:
            assert reference_P2 is not None
            rewards_P2 = options.beta * (logp_P2 - reference_P2)
            losses = _sigmoid(rewards_P2[:, 0] - rewards_P2[:, 1], options.label_smoothing)
    chosen, rejected = rewards_P2.detach().unbind(1)
    return Scored(losses.mean(), chosen, rejected, _above(chosen - rejected))


def _sigmoid(margin_P: Tensor, smoothing: float) -> Tensor:
    """-log sigmoid; with smoothing the expected loss if a pair is the wrong way round with that probability (conservative DPO)."""
    if not smoothing:
        return -F.logsigmoid(margin_P)
    return -F.logsigmoid(margin_P) * (1 - smoothing) - F.logsigmoid(-margin_P) * smoothing


def _kto(options: Dpo, logp_P2: Tensor, reference_P2: Tensor, labels_P: Tensor) -> Scored:
    """Equations 7 and 8 of KTO: the reference point is a divergence estimated from answers to other prompts, without a gradient."""
    ratio_P2 = logp_P2 - reference_P2
    divergence = ratio_P2[:, 1].detach().mean().clamp(min=0)
    margin_P = options.beta * (ratio_P2[:, 0] - divergence)
    losses = torch.where(
        labels_P, options.desirable_weight * (1 - margin_P.sigmoid()), options.undesirable_weight * (1 - (-margin_P).sigmoid())
    )
    rewards_P, sign_P = (options.beta * ratio_P2[:, 0]).detach(), torch.where(labels_P, 1.0, -1.0)
    return Scored(losses.mean(), rewards_P[labels_P], rewards_P[~labels_P], _above(sign_P * margin_P.detach()), divergence)


def _above(margin_P: Tensor) -> Tensor:
    return ((margin_P.sign() + 1) / 2).mean()
