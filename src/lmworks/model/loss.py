"""The loss of the head, in chunks of tokens, so that the logits of a whole batch never exist. The z-loss is added here.

Shapes: N tokens, M tokens of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.host.devices import at_least_fp32

IGNORE = -100


class HeadLoss(NamedTuple):
    """Sums over the valid tokens: cross-entropy in nats, and the squared log-partition (z-loss, arXiv:2204.02311).

    `of_tokens_N` is the cross-entropy of each token, 0 for one without a label; a weight multiplies it in `cross_entropy` only. None of
    them has a gradient.
    """

    cross_entropy: Tensor
    z: Tensor
    of_tokens_N: Tensor


ChunkLoss = Callable[[Tensor, Tensor, float, float, bool, Tensor | None], tuple[Tensor, Tensor, Tensor | None]]


def head_loss(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, softcap: float, z_weight: float, chunk: int, chunk_loss: ChunkLoss,
    weights_N: Tensor | None = None,
) -> tuple[Tensor, HeadLoss]:  # fmt: skip
    """The summed loss, cross-entropy + z_weight * z (`model.z_loss_weight`), for the backward pass, and its two terms, for the metrics.

    `chunk` tokens at a time go through `chunk_loss`: the function below, or its compiled form. `weights_N` (fp32) multiply the
    cross-entropy of each token and its gradient; they are constants, and with them there is no z-loss.
    """
    z_weight = z_weight if weights_N is None else 0.0
    if not torch.is_grad_enabled():  # parameters require gradients even then
        hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()
    total, cross_entropy, z, of_tokens_N = _ChunkedHead.apply(
        hidden_ND, weight_VD, labels_N, softcap, z_weight, chunk, chunk_loss, weights_N
    )
    return total, HeadLoss(cross_entropy, z, of_tokens_N)


def head_loss_plain(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, softcap: float, z_weight: float, weights_N: Tensor | None = None
) -> tuple[Tensor, HeadLoss]:
    """`head_loss` with all logits at once: the reference implementation for tests."""
    logits = soft_cap(F.linear(hidden_ND, weight_VD).float(), softcap)
    of_tokens_N = F.cross_entropy(logits, labels_N.long(), ignore_index=IGNORE, reduction="none")
    cross_entropy = of_tokens_N.sum() if weights_N is None else (of_tokens_N * weights_N).sum()
    z_weight = z_weight if weights_N is None else 0.0
    z = (logits.logsumexp(-1).square() * (labels_N != IGNORE)).sum()
    return cross_entropy + z_weight * z, HeadLoss(cross_entropy.detach(), z.detach(), of_tokens_N.detach())


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), or the unchanged logits if cap is 0."""
    return cap * torch.tanh(logits / cap) if cap else logits


class _ChunkedHead(torch.autograd.Function):
    """Computes the gradient in the forward pass, chunk by chunk, so that logits are neither saved nor recomputed."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, softcap, z_weight, chunk, chunk_loss, weights_N):  # type: ignore[no-untyped-def, override]
        needs_grad, frozen = any(ctx.needs_input_grad[:2]), not ctx.needs_input_grad[1]
        weight = weight_VD.to(hidden_ND.dtype)
        grad_hidden = torch.empty_like(hidden_ND) if needs_grad else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_grad and not frozen else None
        cross_entropy = torch.zeros((), device=hidden_ND.device)
        z = torch.zeros((), device=hidden_ND.device)
        of_tokens_N = torch.empty(hidden_ND.shape[0], device=hidden_ND.device, dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
        for start in range(0, hidden_ND.shape[0], chunk):
            hidden_MD, labels_M = hidden_ND[start : start + chunk], labels_N[start : start + chunk]
            logits_MV = F.linear(hidden_MD, weight)
            weights_M = None if weights_N is None else weights_N[start : start + chunk]
            ce, zz, grad_MV = chunk_loss(logits_MV, labels_M, softcap, z_weight, needs_grad, weights_M)
            cross_entropy += (ce if weights_M is None else ce * weights_M).sum()
            z += zz
            of_tokens_N[start : start + chunk] = ce
            if grad_hidden is not None:
                torch.mm(grad_MV, weight, out=grad_hidden[start : start + chunk])
            if grad_weight is not None:
                if hidden_ND.dtype == torch.float32:
                    grad_weight.addmm_(grad_MV.T, hidden_MD)
                else:
                    grad_weight += grad_MV.T @ hidden_MD
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(cross_entropy, z, of_tokens_N)
        return cross_entropy + z_weight * z, cross_entropy, z, of_tokens_N

    @staticmethod
    def backward(ctx, grad_total, *_):  # type: ignore[no-untyped-def, override]
        grad_hidden, grad_weight = ctx.saved_tensors
        of_weight = None if grad_weight is None else grad_weight * grad_total
        return grad_hidden * grad_total.to(grad_hidden.dtype), of_weight, None, None, None, None, None, None


def chunk_loss(
    logits_MV: Tensor, labels_M: Tensor, softcap: float, z_weight: float, needs_grad: bool, weights_M: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The cross-entropy of each token of a chunk, 0 for one without a label, the summed squared log-partition, and
    d(ce + z_weight * z)/d(logits) in the logits' type, multiplied by the weights of the tokens."""
    capped = soft_cap(at_least_fp32(logits_MV), softcap)
    valid = labels_M != IGNORE
    target = labels_M.long().clamp_min(0)[:, None]
    eager = not torch.compiler.is_compiling()
    if eager:
        probability_MV = capped.softmax(-1)
        lse_M = _log_partition(capped, probability_MV, target)
    else:
        lse_M = capped.logsumexp(-1)
        probability_MV = (capped - lse_M[:, None]).exp_()
    ce = (lse_M - capped.gather(1, target)[:, 0]) * valid
    z = (lse_M.square() * valid).sum()
    if not needs_grad:
        return ce, z, None
    hit = torch.full_like(target, -1, dtype=capped.dtype)
    if eager and weights_M is None and valid.device.type == "cpu" and bool(valid.all()):
        factor_M = None
    else:
        factor_M = valid if weights_M is None else valid * weights_M
    return ce, z, logits_gradient(capped, probability_MV, lse_M, target, hit, factor_M, softcap, z_weight).to(logits_MV.dtype)


def _log_partition(logits_MV: Tensor, probability_MV: Tensor, target_M1: Tensor) -> Tensor:
    """The log-partition of each row from its softmax: any logit less the logarithm of its probability. The largest always serves. On CPUs
    the target does where its probability is precise, mostly everywhere, without two passes over all logits."""
    precise_M = None
    if logits_MV.device.type == "cpu":
        of_target_M = probability_MV.gather(1, target_M1)[:, 0]
        by_target_M, precise_M = logits_MV.gather(1, target_M1)[:, 0] - of_target_M.log(), of_target_M > _PRECISE
        if precise_M.all():
            return by_target_M
    by_largest_M = logits_MV.amax(-1) - probability_MV.amax(-1).log()
    return by_largest_M if precise_M is None else torch.where(precise_M, by_target_M, by_largest_M)


_PRECISE = 1e-30  # in fp32, numbers below 1e-38 have fewer bits, or none


def logits_gradient(
    capped_MV: Tensor, probability_MV: Tensor, lse_M: Tensor, target_M1: Tensor, hit_M1: Tensor, factor_M: Tensor | None, softcap: float,
    z_weight: float,
) -> Tensor:  # fmt: skip
    """factor * d(ce + z_weight * z)/d(logits), computed in place of the probabilities; `factor` is 0 for a token without a label, None
    where all are 1, and `hit` is -1 if the target is among these logits, else 0."""
    grad = probability_MV
    if z_weight:
        grad *= (1 + 2 * z_weight * lse_M)[:, None]
    grad.scatter_add_(1, target_M1, hit_M1)
    if softcap:
        grad *= 1 - (capped_MV / softcap).square()
    if factor_M is not None:
        grad *= factor_M[:, None]
    return grad
