"""Attention by FlexAttention (Dong et al. 2024, arXiv:2412.05496), which has a backward pass on GPUs only.

The reference implementation is `lmworks.model.chunked`.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads, C head dimension, V value dimension, n and m blocks of queries and
keys.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

_SIZE = 128


def has_flex(device: torch.device) -> bool:
    """Whether the Triton kernel runs on this device: NVIDIA GPUs from Ampere on, and AMD GPUs."""
    return device.type == "cuda" and (torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0))


def attend_flex(query_BHTC: Tensor, key_BKSC: Tensor, value_BKSV: Tensor, blocks: BlockMask) -> Tensor:
    """softmax(q k^T / sqrt(C)) v under the block mask `blocks`; (B, H, T, V)."""
    attend = flex_attention if torch.compiler.is_compiling() else _compiled()
    out: Tensor = attend(query_BHTC, key_BKSC, value_BKSV, block_mask=blocks, enable_gqa=query_BHTC.shape[1] != key_BKSC.shape[1])
    return out


@cache
def _compiled():  # type: ignore[no-untyped-def]
    """FlexAttention, compiled: in eager mode, as in evaluation, it would compute all scores."""
    return torch.compile(flex_attention)


def block_mask(first_BT: Tensor, last_BT: Tensor, keys: int) -> BlockMask:
    """The block mask: which blocks of keys each block of queries sees fully, partly or not at all, without a dense mask."""
    T = first_BT.shape[1]
    n, m = -(-T // _SIZE), -(-keys // _SIZE)
    pad = (0, n * _SIZE - T)  # with queries that see nothing
    firsts_Bnq, lasts_Bnq = F.pad(first_BT, pad, value=keys).view(-1, n, _SIZE), F.pad(last_BT, pad, value=-1).view(-1, n, _SIZE)
    begin_m = torch.arange(m, device=first_BT.device) * _SIZE
    end_m = begin_m + _SIZE - 1
    some_Bnm = (end_m >= firsts_Bnq.amin(-1, keepdim=True)) & (begin_m <= lasts_Bnq.amax(-1, keepdim=True))
    all_Bnm = (begin_m >= firsts_Bnq.amax(-1, keepdim=True)) & (end_m <= lasts_Bnq.amin(-1, keepdim=True))

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first_BT[batch, query] <= key) & (key <= last_BT[batch, query])

    partly, wholly = (_listed(blocks[:, None]) for blocks in (some_Bnm & ~all_Bnm, all_Bnm))
    return BlockMask.from_kv_blocks(*partly, *wholly, BLOCK_SIZE=_SIZE, mask_mod=sees, seq_lengths=(T, keys))


def _listed(blocks_B1nm: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and which: those first, the others after them."""
    blocks = blocks_B1nm.int()
    return blocks.sum(-1, dtype=torch.int32), torch.argsort(blocks, dim=-1, descending=True, stable=True).int()
