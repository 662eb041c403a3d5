"""Attention on a CPU as on a GPU: the same masks, and plain operations in place of the kernel, whose backward needs a GPU."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from lmworks.model import documents
from lmworks.parallel import context


def flex_on_cpu(patch: pytest.MonkeyPatch) -> list[BlockMask]:
    """Every device has FlexAttention, which `attend` computes; the masks that it is given are added to what this returns."""
    used: list[BlockMask] = []

    def attend_and_note(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask) -> Tensor:
        used.append(blocks)
        return attend(query, key, value, blocks)

    def attend_lse(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask) -> tuple[Tensor, Tensor]:
        used.append(blocks)
        return attend(query, key, value, blocks), scores_of(query, key, blocks).logsumexp(-1)

    for module in (documents, context):
        patch.setattr(module, "has_flex", lambda device: True)
        patch.setattr(module, "attend_flex", attend_and_note)
        patch.setattr(module, "attend_flex_lse", attend_lse)
    return used


def attend(query_BHTC: Tensor, key_BKSC: Tensor, value_BKSV: Tensor, blocks: BlockMask) -> Tensor:
    """Attention over the pairs that `blocks` says, in the blocks that it lists: (B, H, T, V)."""
    value = value_BKSV.repeat_interleave(query_BHTC.shape[1] // value_BKSV.shape[1], 1)
    return scores_of(query_BHTC, key_BKSC, blocks).softmax(-1).to(value.dtype) @ value


def scores_of(query_BHTC: Tensor, key_BKSC: Tensor, blocks: BlockMask) -> Tensor:
    """The scores (B, H, T, S) in fp32, -inf for all other pairs."""
    (B, H, T, C), S = query_BHTC.shape, key_BKSC.shape[2]
    seen_B1TS = create_mask(blocks.mask_mod, B, 1, T, S, device=query_BHTC.device.type)
    size = blocks.BLOCK_SIZE[0]
    listed = blocks.to_dense().bool().repeat_interleave(size, -2).repeat_interleave(size, -1)[..., :T, :S]
    key = key_BKSC.repeat_interleave(H // key_BKSC.shape[1], 1)
    return (query_BHTC @ key.mT * C**-0.5).masked_fill(~(seen_B1TS & listed), float("-inf")).float()
