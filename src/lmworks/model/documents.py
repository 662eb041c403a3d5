"""Document boundaries: the single source of positions and attention masks (promise 6).

Shapes: B batch, T queries, S keys, N = B * T, n documents. `cu_seqlens` (n + 1,) are the starts of the documents in the flattened
batch, then N. A row of the batch always starts a document.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lmworks.model.chunked import attend_chunks
from lmworks.model.flex import attend_flex, block_mask, has_flex

_KEPT = 2048 * 2048  # pairs of query and key, up to which their mask is made once for all layers
_BLOCKED = 128  # queries from which on a GPU has block masks: one block. Its fused kernels take no dense mask together with shared heads


@dataclass(frozen=True)
class Visible:
    """An attention mask as intervals: each query sees the keys from index `first` to index `last` of its row, both (B, T), of `keys` keys.

    Causal attention, documents and sliding windows all have this form, which needs two numbers per query instead of one per pair.
    `kept` is the dense mask, of short rows on CPUs and of few queries, and `blocks` the block mask of FlexAttention on a GPU. Every query
    sees at least itself. `bias` is the dense mask as numbers that are added to the scores, which attention would otherwise make in each
    layer.
    """

    first_BT: Tensor
    last_BT: Tensor
    keys: int
    kept_B1TS: Tensor | None = None
    blocks: BlockMask | None = None
    bias_B1TS: Tensor | None = None

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

    def whole(self, key_BKSC: Tensor) -> Tensor:
        """All keys that can be seen; the same unless other ranks hold some (context parallelism)."""
        return key_BKSC

    def attend(self, query_BHTC: Tensor, key_BKSC: Tensor, value_BKSV: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(C)) v over the visible keys, (B, H, T, V), in memory linear in the length."""
        if self.blocks is not None and query_BHTC.dtype != torch.float64:  # the Triton kernel has no fp64
            return attend_flex(query_BHTC, key_BKSC, value_BKSV, self.blocks)
        return attend_chunks(query_BHTC, key_BKSC, value_BKSV, self.first_BT, self.last_BT, query_BHTC.shape[-1] ** -0.5)[0]


def visible(last_BT: Tensor, keys: int, window: int | None, start_BT: Tensor | int = 0) -> Visible:
    """The mask of queries at indices `last_BT` in documents that begin at `start_BT`, with or without a sliding window."""
    seen = Visible(first_seen(last_BT, window, start_BT), last_BT, keys)
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
