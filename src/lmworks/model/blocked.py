"""Attention of short rows on CPUs: one block of queries at a time with plain matrix products, saving the probabilities for backward.

At T = 512 it takes 0.8 of the time of the same products when compiled, and those take 0.4 of the time of the fused kernel (LOG.md): half
of the scores are never computed, and the scores of a block stay in the CPU cache. It is one operator for the compiler, which would
otherwise spend most of its time on the loops of every block.

Shapes: B batch, T queries and keys, H query heads, K key/value heads, G = H / K, C head dimension, V value dimension, Q queries of a
block, E the end of the block, R = G * Q: the heads of a group share their keys, so that one product serves all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_QUERIES = 64


@torch.library.custom_op("lmworks::attend_blocks", mutates_args=())
def attend_blocks(
    query_BHTC: Tensor, key_BKTC: Tensor, value_BKTV: Tensor, mask_B1TT: Tensor | None, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """softmax(scale q k^T) v under a causal mask: (B, H, T, V), and the probabilities of each block (B, K, R, E)."""
    B, H, T, _ = query_BHTC.shape
    query, hidden_B1TT = _grouped(query_BHTC, key_BKTC) * scale, ~_mask(mask_B1TT, query_BHTC)
    out = value_BKTV.new_empty(B, *query.shape[1:4], value_BKTV.shape[-1])
    kept = []
    for rows, end in _blocks(T):
        scores = (query[:, :, :, rows].flatten(2, 3) @ key_BKTC[:, :, :end].transpose(-1, -2)).float()
        scores.unflatten(2, (-1, end - rows.start)).masked_fill_(hidden_B1TT[:, :, None, rows, :end], float("-inf"))
        weights = scores.softmax(-1).to(value_BKTV.dtype)
        out[:, :, :, rows] = (weights @ value_BKTV[:, :, :end]).unflatten(2, (-1, end - rows.start))
        kept.append(weights)
    return out.view(B, H, T, -1), kept


@torch.library.custom_op("lmworks::attend_blocks_backward", mutates_args=())
def attend_blocks_backward(
    grad_BHTV: Tensor, query_BHTC: Tensor, key_BKTC: Tensor, value_BKTV: Tensor, out_BHTV: Tensor, kept: list[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    query, grad = _grouped(query_BHTC, key_BKTC), _grouped(grad_BHTV, key_BKTC)
    # the term that the softmax subtracts from each score's gradient: the sum over keys of weight times gradient
    mean = _grouped((grad_BHTV.float() * out_BHTV.float()).sum(-1, keepdim=True), key_BKTC)
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    grad_key = torch.zeros(key_BKTC.shape, dtype=torch.float32, device=key_BKTC.device)
    grad_value = torch.zeros(value_BKTV.shape, dtype=torch.float32, device=key_BKTC.device)
    for weights, (rows, end) in zip(kept, _blocks(query_BHTC.shape[2]), strict=True):
        key, value, grad_BKRV = key_BKTC[:, :, :end], value_BKTV[:, :, :end], grad[:, :, :, rows].flatten(2, 3)
        grad_value[:, :, :end] += weights.transpose(-1, -2) @ grad_BKRV
        grad_scores = (grad_BKRV @ value.transpose(-1, -2)).float().sub_(mean[:, :, :, rows].flatten(2, 3)).mul_(weights).to(query.dtype)
        grad_query[:, :, :, rows] = (grad_scores @ key).unflatten(2, (-1, end - rows.start))
        grad_key[:, :, :end] += grad_scores.transpose(-1, -2) @ query[:, :, :, rows].flatten(2, 3)
    return grad_query.view(query_BHTC.shape).mul_(scale), grad_key.mul_(scale).to(key_BKTC.dtype), grad_value.to(value_BKTV.dtype)


def _grouped(x_BHTC: Tensor, key_BKTC: Tensor) -> Tensor:
    """(B, K, G, T, C)"""
    return x_BHTC.reshape(x_BHTC.shape[0], key_BKTC.shape[1], -1, *x_BHTC.shape[2:])


def _mask(mask_B1TT: Tensor | None, query_BHTC: Tensor) -> Tensor:
    T = query_BHTC.shape[2]
    return torch.ones(1, 1, T, T, dtype=torch.bool, device=query_BHTC.device).tril() if mask_B1TT is None else mask_B1TT


def _blocks(T: int) -> Iterator[tuple[slice, int]]:
    """The queries of each block, and where they end."""
    for start in range(0, T, _QUERIES):
        end = min(start + _QUERIES, T)
        yield slice(start, end), end


@attend_blocks.register_fake
def _(query_BHTC, key_BKTC, value_BKTV, mask_B1TT, scale):  # type: ignore[no-untyped-def]
    B, H, T, _ = query_BHTC.shape
    K = key_BKTC.shape[1]
    kept = [value_BKTV.new_empty(B, K, H // K * (end - rows.start), end) for rows, end in _blocks(T)]
    return value_BKTV.new_empty(B, H, T, value_BKTV.shape[-1]), kept


@attend_blocks_backward.register_fake
def _(grad, query, key, value, out, kept, scale):  # type: ignore[no-untyped-def]
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, _, ctx.scale = inputs
    out, kept = output
    ctx.save_for_backward(query, key, value, out, *kept)


def _differentiate(ctx, grad_out, _):  # type: ignore[no-untyped-def]
    query, key, value, out, *kept = ctx.saved_tensors
    return (*attend_blocks_backward(grad_out, query, key, value, out, kept, ctx.scale), None, None)


attend_blocks.register_autograd(_differentiate, setup_context=_keep)
