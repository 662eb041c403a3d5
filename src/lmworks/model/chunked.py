"""Attention in linear memory: one block of queries at a time, over the keys that they can see; and FlexAttention on GPUs.

Saved for the backward pass are queries, keys, values, the output and the log-sum-exp of each query; scores are recomputed
(FlashAttention, Dao et al. 2022, arXiv:2205.14135). The keys that a block can see are contiguous, so later tokens and other documents cost
nothing. `attend_chunks` is the reference implementation of `attend_flex` (FlexAttention, Dong et al. 2024, arXiv:2412.05496), which has a
backward pass on GPUs only.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads, G = H / K, C head dimension, V value dimension, Q queries of a
block, R keys that they see; for FlexAttention, n and m blocks of queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from lmworks.host.devices import at_least_fp32
from lmworks.model.operators import operator, register_autograd, register_fake

_SCORES = 1 << 20  # of one block, at most, as long as it has _FEWEST queries
_FEWEST, _MOST = 32, 512
_MEASURED = 64  # queries of a block whose largest score alone is wanted


@operator
def attend_chunks(
    query_BHTC: Tensor, key_BKSC: Tensor, value_BKSV: Tensor, first_BT: Tensor, last_BT: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v where query t of a row sees keys first[t] to last[t]: (B, H, T, V) and the log-sum-exp (B, H, T), in fp32
    or fp64.

    It is one operator for the compiler, because the keys of a block are known only at run time.
    """
    B, H, T, _ = query_BHTC.shape
    out = query_BHTC.new_empty(B, H, T, value_BKSV.shape[-1])
    lse = query_BHTC.new_empty(B, H, T, dtype=torch.promote_types(query_BHTC.dtype, torch.float32))
    for row, rows, keys in _blocks(query_BHTC, first_BT, last_BT):
        key, value = key_BKSC[row, :, keys], value_BKSV[row, :, keys]
        scores_KGQR = _scores(query_BHTC[row, :, rows], key, first_BT[row, rows], last_BT[row, rows], keys.start, scale)
        most = scores_KGQR.amax(-1, keepdim=True)
        weights = scores_KGQR.sub_(most).exp_()
        total = weights.sum(-1, keepdim=True)
        mixed = _product(weights.to(value.dtype), value)
        out[row, :, rows] = (mixed / total.to(mixed.dtype)).view(H, -1, value.shape[-1])
        lse[row, :, rows] = (most + total.log()).view(H, -1)
    return out, lse


@operator
def attend_chunks_backward(
    grad_BHTV: Tensor, query_BHTC: Tensor, key_BKSC: Tensor, value_BKSV: Tensor, first_BT: Tensor, last_BT: Tensor,
    out_BHTV: Tensor, lse_BHT: Tensor, scale: float, grad_lse_BHT: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    query, key, value = chunks_backward(
        grad_BHTV, query_BHTC, key_BKSC, value_BKSV, first_BT, last_BT, out_BHTV, lse_BHT, scale, grad_lse_BHT
    )
    return query, key.to(key_BKSC.dtype), value.to(value_BKSV.dtype)


def chunks_backward(
    grad_BHTV: Tensor, query_BHTC: Tensor, key_BKSC: Tensor, value_BKSV: Tensor, first_BT: Tensor, last_BT: Tensor,
    out_BHTV: Tensor, lse_BHT: Tensor, scale: float, grad_lse_BHT: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, and of key and value in fp32, because they accumulate over blocks. `grad_lse`: the gradient of the log-sum-exp,
    where something else reads it; that of each score gets it times the weight."""
    K, C, V = key_BKSC.shape[1], key_BKSC.shape[-1], value_BKSV.shape[-1]
    grad_query = torch.empty(query_BHTC.shape, dtype=query_BHTC.dtype, device=query_BHTC.device)
    grad_key = torch.zeros(key_BKSC.shape, dtype=torch.float32, device=key_BKSC.device)
    grad_value = torch.zeros(value_BKSV.shape, dtype=torch.float32, device=key_BKSC.device)
    for row, rows, keys in _blocks(query_BHTC, first_BT, last_BT):
        query, key, value = query_BHTC[row, :, rows], key_BKSC[row, :, keys], value_BKSV[row, :, keys]
        grad = grad_BHTV[row, :, rows]
        weights = _scores(query, key, first_BT[row, rows], last_BT[row, rows], keys.start, scale)
        weights.sub_(lse_BHT[row, :, rows].view(K, -1, weights.shape[2], 1)).exp_()
        # the term that the softmax subtracts from each score's gradient: the sum over keys of weight times gradient
        mean = (grad.float() * out_BHTV[row, :, rows].float()).sum(-1).view(K, -1, weights.shape[2], 1)
        if grad_lse_BHT is not None:
            mean = mean - grad_lse_BHT[row, :, rows].view(mean.shape)
        grad_KMV = grad.reshape(K, -1, V)
        grad_value[row, :, keys] += (weights.to(grad.dtype).view(K, -1, key.shape[1]).transpose(1, 2) @ grad_KMV).float()
        grad_weights = (grad_KMV @ value.transpose(1, 2)).float().view_as(weights)
        grad_scores = weights.mul_(grad_weights.sub_(mean)).mul_(scale).to(query.dtype)
        grad_query[row, :, rows] = _product(grad_scores, key).view(query.shape)
        grad_key[row, :, keys] += (grad_scores.view(K, -1, key.shape[1]).transpose(1, 2) @ query.reshape(K, -1, C)).float()
    return grad_query, grad_key, grad_value


@operator
def largest_logits(query_BHTC: Tensor, key_BKSC: Tensor, first_BT: Tensor, last_BT: Tensor, scale: float) -> Tensor:
    """The largest score scale q k of each query head over all pairs that `attend_chunks` would see; (H,) fp32.

    It is one operator, so that neither the compiler nor selective checkpointing keeps the scores.
    """
    K, H = key_BKSC.shape[1], query_BHTC.shape[1]
    most_KG = query_BHTC.new_full((K, H // K), float("-inf"), dtype=torch.promote_types(query_BHTC.dtype, torch.float32))
    for row, rows, keys in _blocks(query_BHTC, first_BT, last_BT, _MEASURED):  # few of the scores of a block are not causal
        products_KGQR = _products(query_BHTC[row, :, rows], key_BKSC[row, :, keys])
        most_KG = torch.maximum(most_KG, _hide(products_KGQR, first_BT[row, rows], last_BT[row, rows], keys.start).amax((-2, -1)))
    return most_KG.flatten().float() * scale


@register_fake(largest_logits)
def _(query_BHTC: Tensor, key_BKSC: Tensor, first_BT: Tensor, last_BT: Tensor, scale: float) -> Tensor:
    return query_BHTC.new_empty(query_BHTC.shape[1], dtype=torch.float32)


def _blocks(query_BHTC: Tensor, first_BT: Tensor, last_BT: Tensor, most: int = _MOST) -> Iterator[tuple[int, slice, slice]]:
    """Row, queries and the keys that at least one of them sees, block by block."""
    B, H, T, _ = query_BHTC.shape
    longest = int(last_BT.max()) + 1
    size = min(max(_SCORES // (H * longest), _FEWEST), most)
    for row in range(B):
        for start in range(0, T, size):
            rows = slice(start, min(start + size, T))
            yield row, rows, slice(int(first_BT[row, rows].min()), int(last_BT[row, rows].max()) + 1)


def _scores(query_HQC: Tensor, key_KRC: Tensor, first_Q: Tensor, last_Q: Tensor, start: int, scale: float) -> Tensor:
    """(K, G, Q, R) in fp32 or fp64, -inf where a query does not see a key. The heads of a group share their keys: one product for all."""
    return _hide(_products(query_HQC, key_KRC).mul_(scale), first_Q, last_Q, start)


def _products(query_HQC: Tensor, key_KRC: Tensor) -> Tensor:
    """q k of each head; (K, G, Q, R)."""
    K, R, C = key_KRC.shape
    return at_least_fp32(query_HQC.reshape(K, -1, C) @ key_KRC.transpose(1, 2)).view(K, -1, query_HQC.shape[1], R)


def _hide(scores_KGQR: Tensor, first_Q: Tensor, last_Q: Tensor, start: int) -> Tensor:
    """-inf, in place, where a query does not see a key."""
    place_R = torch.arange(start, start + scores_KGQR.shape[-1], device=scores_KGQR.device)
    hidden_QR = (place_R < first_Q[:, None]) | (place_R > last_Q[:, None])
    return scores_KGQR.masked_fill_(hidden_QR, float("-inf"))


def _product(weights_KGQR: Tensor, value_KRV: Tensor) -> Tensor:
    K, G, Q, R = weights_KGQR.shape
    return (weights_KGQR.view(K, G * Q, R) @ value_KRV).view(K, G, Q, -1)


@register_fake(attend_chunks)
def _(query_BHTC: Tensor, key_BKSC: Tensor, value_BKSV: Tensor, first_BT: Tensor, last_BT: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    B, H, T, _ = query_BHTC.shape
    wide = torch.promote_types(query_BHTC.dtype, torch.float32)
    return query_BHTC.new_empty(B, H, T, value_BKSV.shape[-1]), query_BHTC.new_empty(B, H, T, dtype=wide)


@register_fake(attend_chunks_backward)
def _(grad, query, key, value, first, last, out, lse, scale, grad_lse=None):  # type: ignore[no-untyped-def]
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.scale = inputs
    ctx.set_materialize_grads(False)  # the log-sum-exp has a gradient only where something reads it
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, grad_out, grad_lse):  # type: ignore[no-untyped-def]
    grads = attend_chunks_backward(grad_out, *ctx.saved_tensors, ctx.scale, grad_lse)
    return (*grads, None, None, None)


register_autograd(attend_chunks, _differentiate, setup_context=_keep)


_SIZE = 128


def has_flex(device: torch.device) -> bool:
    """Whether the Triton kernel runs on this device: NVIDIA GPUs from Ampere on, and AMD GPUs."""
    return device.type == "cuda" and (torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0))


def attend_flex(
    query_BHTC: Tensor, key_BKSC: Tensor, value_BKSV: Tensor, blocks: BlockMask, logits: list[Tensor] | None = None
) -> Tensor:  # fmt: skip
    """softmax(q k^T / sqrt(C)) v under the block mask `blocks`; (B, H, T, V). The largest score of each head is appended to `logits`."""
    attend = flex_attention if torch.compiler.is_compiling() else _compiled()
    if logits is not None:
        grouped = query_BHTC.shape[1] != key_BKSC.shape[1]
        mixed, found = attend(
            query_BHTC, key_BKSC, value_BKSV, block_mask=blocks, enable_gqa=grouped, return_aux=AuxRequest(max_scores=True)
        )
        logits.append(found.max_scores.detach().amax((0, 2)))
        return mixed  # type: ignore[no-any-return]
    out: Tensor = attend(query_BHTC, key_BKSC, value_BKSV, block_mask=blocks, enable_gqa=query_BHTC.shape[1] != key_BKSC.shape[1])
    return out


def attend_flex_lse(query_BHTC: Tensor, key_BKSC: Tensor, value_BKSV: Tensor, blocks: BlockMask) -> tuple[Tensor, Tensor]:
    """`attend_flex`, and the log-sum-exp of the scores of each query; (B, H, T)."""
    attend = flex_attention if torch.compiler.is_compiling() else _compiled()
    shared = query_BHTC.shape[1] != key_BKSC.shape[1]
    out, found = attend(query_BHTC, key_BKSC, value_BKSV, block_mask=blocks, enable_gqa=shared, return_aux=AuxRequest(lse=True))
    return out, found.lse


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
