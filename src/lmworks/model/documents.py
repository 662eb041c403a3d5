"""Where documents begin and end: the one source of positions and attention masks (promise 6).

Shapes: B batch, T time, N = B * T, n documents. `cu_seqlens` (n + 1,) are the starts of the documents in the flattened
batch, then N. A row of the batch always starts a document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Positions (B, T) within each token's document, and the masks (B, 1, T, T) of who sees whom.

    `mask` is None where plain causal attention says the same; `window_mask` is that of the sliding layers.
    """

    positions_BT: Tensor
    mask: Tensor | None
    window_mask: Tensor | None


def from_cu_seqlens(shape: tuple[int, int], cu_seqlens: Tensor | None, window: int | None, device: torch.device) -> Documents:
    """Masks and positions of a batch of `shape` (B, T); without `cu_seqlens` each row is one document."""
    rows, length = shape
    steps = torch.arange(length, device=device)
    if cu_seqlens is None or cu_seqlens.numel() == rows + 1:
        positions = steps.expand(rows, length)
        window_mask = _visible(positions, None, window) if window and window < length else None
        return Documents(positions, None, window_mask)
    flat = torch.arange(rows * length, device=device)
    document = torch.searchsorted(cu_seqlens.to(flat.dtype), flat, right=True) - 1
    positions = (flat - cu_seqlens[document]).view(rows, length)
    document_BT = document.view(rows, length)
    mask = _visible(positions, document_BT, None)
    return Documents(positions, mask, _visible(positions, document_BT, window) if window and window < length else mask)


def _visible(positions_BT: Tensor, document_BT: Tensor | None, window: int | None) -> Tensor:
    """True where a query may see a key; (B, 1, T, T). Within a document, order in the row is order of position."""
    distance = positions_BT[:, :, None] - positions_BT[:, None, :]
    visible = distance >= 0
    if window:
        visible = visible & (distance < window)
    if document_BT is not None:
        visible = visible & (document_BT[:, :, None] == document_BT[:, None, :])
    return visible[:, None]
