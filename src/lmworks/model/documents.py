"""Document boundaries: the single source of positions and attention masks (promise 6).

Shapes: B batch, T queries, S keys, N = B * T, n documents. `cu_seqlens` (n + 1,) are the starts of the documents in the flattened
batch, then N. A row of the batch always starts a document.

Attention of short rows on CPUs: one block of queries at a time with plain matrix products, saving the probabilities for backward.

At T = 512 it takes 0.8 of the time of the same products when compiled, and those take 0.4 of the time of the fused kernel (LOG.md): half
of the scores are never computed, and the scores of a block stay in the CPU cache. It is one operator for the compiler, which would
otherwise spend most of its time on the loops of every block.

Shapes: B batch, T queries and keys, H query heads, K key/value heads, G = H / K, C head dimension, V value dimension, Q queries of a
block, E the keys that they may see, R = G * Q: the heads of a group share their keys, so that one product serves all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lmworks.model.chunked import attend_chunks, attend_flex, attend_flex_lse, block_mask, has_flex, largest_logits
from lmworks.model.operators import operator, register_autograd, register_fake

_KEPT = 2048 * 2048  # pairs of query and key, up to which their mask is made once for all layers
_BLOCKED = 128  # queries from which on a GPU has block masks: one block. Its fused kernels take no dense mask together with shared heads


@dataclass(frozen=True)
class Visible:
    """An attention mask as intervals: each query sees the keys from index `first` to index `last` of its row, both (B, T), of `keys` keys.

    Causal attention, documents and sliding windows all have this form, which needs two numbers per query instead of one per pair.
    `kept` is the dense mask, of short rows on CPUs and of few queries, and `blocks` the block mask of FlexAttention on a GPU. Every query
    sees at least itself. `bias` is the dense mask as numbers that are added to the scores, which attention would otherwise make in each
    layer. `window` is how many keys a query sees at most, if that is limited. One query in a cache that uses slots again may not see all
    keys from `first` to `last`: there `kept` is what counts.
    """

    first_BT: Tensor
    last_BT: Tensor
    keys: int
    kept_B1TS: Tensor | None = None
    blocks: BlockMask | None = None
    bias_B1TS: Tensor | None = None
    window: int | None = None

    def with_bias(self, dtype: torch.dtype) -> Visible:
        """With `bias` in this type."""
        dense = self.dense()
        return replace(self, bias_B1TS=torch.zeros_like(dense, dtype=dtype).masked_fill_(~dense, float("-inf")))

    def dense(self) -> Tensor:
        """True where a query sees a key; (B, 1, T, S)."""
        if self.kept_B1TS is not None:
            return self.kept_B1TS
        place_S = torch.arange(self.keys, device=self.first_BT.device)
        return ((self.first_BT[:, :, None] <= place_S) & (place_S <= self.last_BT[:, :, None]))[:, None]

    @torch.no_grad()
    def largest_logits(self, query_BHTC: Tensor, key_BKSC: Tensor) -> Tensor:
        """The largest score of each head (H,), in a pass of its own over queries and keys."""
        scale = query_BHTC.shape[-1] ** -0.5
        return largest_logits(query_BHTC.detach(), self.whole(key_BKSC.detach()), self.first_BT, self.last_BT, scale)

    def whole(self, key_BKSC: Tensor) -> Tensor:
        """All keys that can be seen; the same unless other ranks hold some (context parallelism)."""
        return key_BKSC

    def attend(self, query_BHTC: Tensor, key_BKSC: Tensor, value_BKSV: Tensor, logits: list[Tensor] | None = None) -> Tensor:
        """softmax(q k^T / sqrt(C)) v over the visible keys, (B, H, T, V), in memory linear in the length; the largest score of each head
        is appended to `logits`."""
        if self.blocks is not None and query_BHTC.dtype != torch.float64:  # the Triton kernel has no fp64
            return attend_flex(query_BHTC, key_BKSC, value_BKSV, self.blocks, *(() if logits is None else (logits,)))
        if logits is not None:
            logits.append(self.largest_logits(query_BHTC, key_BKSC))
        return attend_chunks(query_BHTC, key_BKSC, value_BKSV, self.first_BT, self.last_BT, query_BHTC.shape[-1] ** -0.5)[0]

    def attend_lse(self, query_BHTC: Tensor, key_BKSC: Tensor, value_BKSV: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and the log-sum-exp of the scores of each query (B, H, T); both with gradients."""
        if self.blocks is not None and query_BHTC.dtype != torch.float64:
            return attend_flex_lse(query_BHTC, key_BKSC, value_BKSV, self.blocks)
        return attend_chunks(query_BHTC, key_BKSC, value_BKSV, self.first_BT, self.last_BT, query_BHTC.shape[-1] ** -0.5)


def causal(query_BHTC: Tensor, key_BKSC: Tensor) -> Visible:
    """The mask of rows that are one document each."""
    places = torch.arange(query_BHTC.shape[2], device=query_BHTC.device)
    return visible(places.expand(query_BHTC.shape[0], -1), key_BKSC.shape[2], None)


def visible(last_BT: Tensor, keys: int, window: int | None, start_BT: Tensor | int = 0) -> Visible:
    """The mask of queries at indices `last_BT` in documents that begin at `start_BT`, with or without a sliding window."""
    seen = Visible(first_seen(last_BT, window, start_BT), last_BT, keys, window=window)
    if last_BT.shape[1] >= _BLOCKED and has_flex(last_BT.device):
        return replace(seen, blocks=block_mask(seen.first_BT, last_BT, keys))
    return replace(seen, kept_B1TS=seen.dense()) if last_BT.shape[1] * keys <= _KEPT else seen


def first_seen(last_BT: Tensor, window: int | None, start_BT: Tensor | int = 0) -> Tensor:
    """The index of the first key that each query sees."""
    first_BT = torch.zeros_like(last_BT) + start_BT
    return torch.maximum(first_BT, last_BT - window + 1) if window else first_BT


@dataclass(frozen=True)
class Documents:
    """Positions (B, T) within each token's document, and attention masks.

    `mask` is None if plain causal attention is equivalent; `window_mask` is that of layers with a sliding window.
    """

    positions_BT: Tensor
    mask: Visible | None
    window_mask: Visible | None

    def of(self, mixer: Any) -> Any:
        """What a layer's mixer reads of this: all of it, if it is recurrent, or the mask of its window, or the other."""
        return self if mixer.recurrent else self.window_mask if mixer.slides else self.mask


def starts(shape: tuple[int, int], cu_seqlens: Tensor) -> Tensor:
    """The index in the row at which each token's document begins; (B, T)."""
    rows, length = shape
    flat = torch.arange(rows * length, device=cu_seqlens.device)
    begins = cu_seqlens[torch.searchsorted(cu_seqlens.to(flat.dtype), flat, right=True) - 1]
    return begins.view(rows, length) - (flat - flat % length).view(rows, length)


def from_cu_seqlens(shape: tuple[int, int], cu_seqlens: Tensor | None, window: int | None, device: torch.device) -> Documents:
    """Positions and masks of a batch of `shape` (B, T); without `cu_seqlens` each row is one document."""
    rows, length = shape
    places = torch.arange(length, device=device).expand(rows, length)
    slides = window is not None and window < length
    # A mask also where each row is one document, as only some batches are: without it their layers would be compiled again. On CPUs long
    # rows without boundaries are left to the fused kernel.
    fused = cu_seqlens is not None and cu_seqlens.numel() == rows + 1 and device.type == "cpu" and length * length > _KEPT
    if cu_seqlens is None or fused:
        return Documents(places, None, visible(places, length, window) if slides else None)
    start = starts(shape, cu_seqlens)
    mask = visible(places, length, None, start)
    return Documents(places - start, mask, visible(places, length, window, start) if slides else mask)


_QUERIES = 64


@operator
def attend_blocks(
    query_BHTC: Tensor, key_BKTC: Tensor, value_BKTV: Tensor, mask_B1TT: Tensor | None, scale: float, window: int
) -> tuple[Tensor, list[Tensor]]:
    """softmax(scale q k^T) v under a causal mask in which a query sees at most `window` keys: (B, H, T, V), and the probabilities of each
    block (B, K, R, E)."""
    B, H, T, _ = query_BHTC.shape
    query, hidden_B1TT = _grouped(query_BHTC, key_BKTC) * scale, ~_mask(mask_B1TT, query_BHTC)
    out = value_BKTV.new_empty(B, *query.shape[1:4], value_BKTV.shape[-1])
    kept = []
    for rows, keys in _blocks(T, window):
        scores = (query[:, :, :, rows].flatten(2, 3) @ key_BKTC[:, :, keys].transpose(-1, -2)).float()
        scores.unflatten(2, (-1, rows.stop - rows.start)).masked_fill_(hidden_B1TT[:, :, None, rows, keys], float("-inf"))
        weights = scores.softmax(-1).to(value_BKTV.dtype)
        out[:, :, :, rows] = (weights @ value_BKTV[:, :, keys]).unflatten(2, (-1, rows.stop - rows.start))
        kept.append(weights)
    return out.view(B, H, T, -1), kept


@operator
def attend_blocks_backward(
    grad_BHTV: Tensor, query_BHTC: Tensor, key_BKTC: Tensor, value_BKTV: Tensor, out_BHTV: Tensor, kept: list[Tensor], scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    query, grad = _grouped(query_BHTC, key_BKTC), _grouped(grad_BHTV, key_BKTC)
    # the term that the softmax subtracts from each score's gradient: the sum over keys of weight times gradient
    mean = _grouped((grad_BHTV.float() * out_BHTV.float()).sum(-1, keepdim=True), key_BKTC)
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    grad_key = torch.zeros(key_BKTC.shape, dtype=torch.float32, device=key_BKTC.device)
    grad_value = torch.zeros(value_BKTV.shape, dtype=torch.float32, device=key_BKTC.device)
    for weights, (rows, keys) in zip(kept, _blocks(query_BHTC.shape[2], window), strict=True):
        key, value, grad_BKRV = key_BKTC[:, :, keys], value_BKTV[:, :, keys], grad[:, :, :, rows].flatten(2, 3)
        grad_value[:, :, keys] += weights.transpose(-1, -2) @ grad_BKRV
        grad_scores = (grad_BKRV @ value.transpose(-1, -2)).float().sub_(mean[:, :, :, rows].flatten(2, 3)).mul_(weights).to(query.dtype)
        grad_query[:, :, :, rows] = (grad_scores @ key).unflatten(2, (-1, rows.stop - rows.start))
        grad_key[:, :, keys] += grad_scores.transpose(-1, -2) @ query[:, :, :, rows].flatten(2, 3)
    return grad_query.view(query_BHTC.shape).mul_(scale), grad_key.mul_(scale).to(key_BKTC.dtype), grad_value.to(value_BKTV.dtype)


def _grouped(x_BHTC: Tensor, key_BKTC: Tensor) -> Tensor:
    """(B, K, G, T, C)"""
    return x_BHTC.reshape(x_BHTC.shape[0], key_BKTC.shape[1], -1, *x_BHTC.shape[2:])


def _mask(mask_B1TT: Tensor | None, query_BHTC: Tensor) -> Tensor:
    T = query_BHTC.shape[2]
    return torch.ones(1, 1, T, T, dtype=torch.bool, device=query_BHTC.device).tril() if mask_B1TT is None else mask_B1TT


def _blocks(T: int, window: int) -> Iterator[tuple[slice, slice]]:
    """The queries of each block, and the keys that they may see."""
    for start in range(0, T, _QUERIES):
        end = min(start + _QUERIES, T)
        yield slice(start, end), slice(max(start + 1 - window, 0), end)


@register_fake(attend_blocks)
def _(query_BHTC, key_BKTC, value_BKTV, mask_B1TT, scale, window):  # type: ignore[no-untyped-def]
    B, H, T, _ = query_BHTC.shape
    K = key_BKTC.shape[1]
    kept = [value_BKTV.new_empty(B, K, H // K * (rows.stop - rows.start), keys.stop - keys.start) for rows, keys in _blocks(T, window)]
    return value_BKTV.new_empty(B, H, T, value_BKTV.shape[-1]), kept


@register_fake(attend_blocks_backward)
def _(grad, query, key, value, out, kept, scale, window):  # type: ignore[no-untyped-def]
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, _, ctx.scale, ctx.window = inputs
    out, kept = output
    ctx.set_materialize_grads(False)  # nothing reads the probabilities: no zeros of their size
    ctx.save_for_backward(query, key, value, out, *kept)


def _differentiate(ctx, grad_out, _):  # type: ignore[no-untyped-def]
    query, key, value, out, *kept = ctx.saved_tensors
    return (*attend_blocks_backward(grad_out, query, key, value, out, kept, ctx.scale, ctx.window), None, None, None)


register_autograd(attend_blocks, _differentiate, setup_context=_keep)
