"""The loss of tokens under the distribution that they were drawn from: with temperature, top-k, top-p and min-p.

The probability of a sampled token in a rollout and in training is one number only if the sampling filters are part of both.

Shapes: M tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmworks.model.loss import ChunkLoss, soft_cap
from lmworks.model.sampling import GenerateOptions, filter_logits
from lmworks.precision import at_least_fp32


def drawn_chunk_loss(inner: ChunkLoss, options: GenerateOptions) -> ChunkLoss:
    """`inner` on tempered and filtered logits, with the gradient of the original ones.

    The filters are constants in the gradient. The label itself is never excluded: where rounding moves it across the border of a filter,
    its probability stays finite. Filters (not the temperature) need the whole vocabulary on each rank.
    """

    def chunk_loss(
        logits_MV: Tensor, labels_M: Tensor, softcap: float, z_weight: float, needs_grad: bool, weights_M: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        capped = soft_cap(at_least_fp32(logits_MV), softcap)
        drawn = filter_logits(capped, options)
        if (options.top_k, options.top_p, options.min_p) != (0, 1.0, 0.0):
            target = labels_M.long().clamp_min(0)[:, None]
            drawn = drawn.scatter(1, target, capped.gather(1, target) / options.temperature)
        ce, z, grad_MV = inner(drawn, labels_M, 0.0, z_weight, needs_grad, weights_M)
        if grad_MV is None:
            return ce, z, None
        grad = grad_MV / options.temperature
        if softcap:
            grad *= 1 - (capped / softcap).square()
        return ce, z, grad.to(logits_MV.dtype)

    return torch.no_grad()(chunk_loss)
