"""Context parallelism: each sequence is split over the ranks of `cp`.

A sequence is split into 2 cp slices, and rank r holds slices r and 2 cp - 1 - r. Early tokens attend to few keys and late ones to many,
so this balances the work (Llama 3, arXiv:2407.21783, section 3.3.2). All modules except attention process tokens independently. Attention
all-gathers keys and values. On CPUs it does so again in the backward pass: only a rank's own are saved, so memory per rank grows with
length / cp. On GPUs FlexAttention saves what was gathered, unless the layer is recomputed. Positions and masks come from the same document
boundaries as in a single process, also for documents that span several slices.

Shapes: B batch, T tokens of this rank, S = cp T tokens of the sequence, H query heads, K key/value heads, C head dimension, V value
dimension, W = C + V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor

from lmworks.errors import UserError
from lmworks.model import Transformer
from lmworks.model.chunked import attend_chunks, attend_flex, attend_flex_lse, block_mask, chunks_backward, has_flex
from lmworks.model.documents import Visible, first_seen, starts
from lmworks.model.mtp import Ahead, look_ahead
from lmworks.model.operators import operator, register_autograd, register_fake
from lmworks.model.router import Router
from lmworks.parallel.collectives import override_members
from lmworks.parallel.mesh import Ranks


def shard_context(model: Transformer, ranks: Ranks) -> None:
    """Make the modules that compute statistics of a whole sequence, other than attention, sum them over all slices."""
    mean_load = _mean_load(ranks.mesh("cp").get_group().group_name, ranks.size("cp"))
    for ffn in model.moe_layers():
        override_members(ffn.router, {"mean_load": mean_load})


def _mean_load(group: Any, size: int) -> Any:
    def mean_load(self: Router, chosen_BTE: Tensor) -> Tensor:
        total = functional.all_reduce(chosen_BTE.mean(1).contiguous(), "sum", group)
        return functional.wait_tensor(total) / size

    return mean_load


def slices(x_BS: Tensor, size: int, rank: int) -> Tensor:
    """The part of full rows that a rank of `cp` holds; (B, T)."""
    parts = x_BS.chunk(2 * size, dim=1)
    return torch.cat((parts[rank], parts[2 * size - 1 - rank]), dim=1)


def place(whole_BS: Tensor, own_N: Tensor, ranks: Ranks) -> None:
    """Write values of this rank's tokens, in the order of `split`, to their places in whole rows; no change elsewhere."""
    size, rank = ranks.size("cp"), ranks.rank("cp")
    if size == 1:
        whole_BS.copy_(own_N.view_as(whole_BS))
        return
    parts, halves = whole_BS.chunk(2 * size, dim=1), own_N.view(len(whole_BS), -1).chunk(2, dim=1)
    parts[rank].copy_(halves[0])
    parts[2 * size - 1 - rank].copy_(halves[1])


def split(
    tokens_BS: Tensor, labels_BS: Tensor, cu_seqlens: Tensor, ranks: Ranks, mtp_layers: int = 0, weights_BS: Tensor | None = None
) -> tuple[Tensor, Tensor, None, Slices, list[Ahead] | None, Tensor | None]:
    """This rank's part of full rows, as the arguments of `Transformer.loss`: tokens, labels, no `cu_seqlens`, the slices, the tokens
    ahead for multi-token prediction, and the weights of the labels.

    Raises `UserError` if the length cannot be split into equal slices.
    """
    size, rank = ranks.size("cp"), ranks.rank("cp")
    length = tokens_BS.shape[1]
    if length % (2 * size):
        raise UserError(f"layout.cp {size} cannot split sequences of {length:,} tokens; the length must be a multiple of {2 * size}")
    places_BS = torch.arange(length, device=tokens_BS.device).expand(tokens_BS.shape)
    start_BS = starts((tokens_BS.shape[0], length), cu_seqlens)
    held = Slices(slices(places_BS, size, rank), slices(start_BS, size, rank), length, ranks.mesh("cp").get_group().group_name, size)
    ahead = None
    if mtp_layers:
        whole = look_ahead(tokens_BS, labels_BS, places_BS - start_BS, mtp_layers)
        ahead = [Ahead(slices(tokens, size, rank), slices(labels, size, rank)) for tokens, labels in whole]
    weights = None if weights_BS is None else slices(weights_BS, size, rank)
    return slices(tokens_BS, size, rank), slices(labels_BS, size, rank), None, held, ahead, weights


@dataclass(frozen=True)
class Slices:
    """The positions of a rank's tokens in their rows. Used in place of a cache: it provides positions and masks, and stores nothing."""

    places_BT: Tensor
    start_BT: Tensor
    length: int
    group: str
    size: int

    def begin(self, steps: int) -> Tensor:
        """Positions in the documents; (B, T)."""
        assert steps == self.places_BT.shape[1]
        return self.places_BT - self.start_BT

    def masks(self, window: int | None) -> tuple[SharedVisible, SharedVisible]:
        """The masks of layers without and with the sliding window."""
        mask = self._mask(None)
        return mask, self._mask(window) if window is not None and window < self.length else mask

    def _mask(self, window: int | None) -> SharedVisible:
        first_BT = first_seen(self.places_BT, window, self.start_BT)
        blocks = block_mask(first_BT, self.places_BT, self.length) if has_flex(first_BT.device) else None
        return SharedVisible(first_BT, self.places_BT, self.length, blocks=blocks, group=self.group, size=self.size)

    def layer(self, index: int) -> None:
        """None: keys and values are gathered in attention."""


@dataclass(frozen=True)
class SharedVisible(Visible):
    """The mask of this rank's queries over the keys of all ranks."""

    group: str = ""
    size: int = 1

    def whole(self, key_BKTC: Tensor) -> Tensor:
        return _gather(key_BKTC, key_BKTC[..., :0], self.group, self.size)[0]

    def attend(self, query_BHTC: Tensor, key_BKTC: Tensor, value_BKTV: Tensor, logits: list[Tensor] | None = None) -> Tensor:
        if self.blocks is not None and query_BHTC.dtype != torch.float64:
            key, value = _Gathered.apply(key_BKTC, value_BKTV, self.group, self.size)
            return attend_flex(query_BHTC, key, value, self.blocks, *(() if logits is None else (logits,)))
        if logits is not None:
            logits.append(self.largest_logits(query_BHTC, key_BKTC))
        scale = query_BHTC.shape[-1] ** -0.5
        return attend_shared(query_BHTC, key_BKTC, value_BKTV, self.first_BT, self.last_BT, scale, self.group, self.size)[0]

    def attend_lse(self, query_BHTC: Tensor, key_BKTC: Tensor, value_BKTV: Tensor) -> tuple[Tensor, Tensor]:
        if self.blocks is not None and query_BHTC.dtype != torch.float64:
            key, value = _Gathered.apply(key_BKTC, value_BKTV, self.group, self.size)
            return attend_flex_lse(query_BHTC, key, value, self.blocks)
        scale = query_BHTC.shape[-1] ** -0.5
        return attend_shared(query_BHTC, key_BKTC, value_BKTV, self.first_BT, self.last_BT, scale, self.group, self.size)


class _Gathered(torch.autograd.Function):
    """The keys and values of all ranks; their gradients are summed over the queries of all ranks, in fp32."""

    @staticmethod
    def forward(ctx: Any, key_BKTC: Tensor, value_BKTV: Tensor, group: Any, size: int) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.size = group, size
        key, value = _gather(key_BKTC, value_BKTV, group, size)
        return key.contiguous(), value.contiguous()

    @staticmethod
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> Any:
        own_key, own_value = _own_sums(grad_key, grad_value, ctx.group, ctx.size)
        return own_key.to(grad_key.dtype), own_value.to(grad_value.dtype), None, None


@operator
def attend_shared(
    query_BHTC: Tensor, key_BKTC: Tensor, value_BKTV: Tensor, first_BT: Tensor, last_BT: Tensor, scale: float, group: str, size: int
) -> tuple[Tensor, Tensor]:
    """`attend_chunks` of this rank's queries over the keys and values of all ranks."""
    key, value = _gather(key_BKTC, value_BKTV, group, size)
    return attend_chunks(query_BHTC, key, value, first_BT, last_BT, scale)


@operator
def attend_shared_backward(
    grad_BHTV: Tensor, query_BHTC: Tensor, key_BKTC: Tensor, value_BKTV: Tensor, first_BT: Tensor, last_BT: Tensor,
    out_BHTV: Tensor, lse_BHT: Tensor, scale: float, group: str, size: int, grad_lse_BHT: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of this rank's queries, keys and values; the latter two are summed over the queries of all ranks, in fp32."""
    key, value = _gather(key_BKTC, value_BKTV, group, size)
    grad_query, grad_key, grad_value = chunks_backward(
        grad_BHTV, query_BHTC, key, value, first_BT, last_BT, out_BHTV, lse_BHT, scale, grad_lse_BHT
    )
    own_key, own_value = _own_sums(grad_key, grad_value, group, size)
    return grad_query, own_key.to(key_BKTC.dtype, copy=True), own_value.to(value_BKTV.dtype, copy=True)


def _gather(key_BKTC: Tensor, value_BKTV: Tensor, group: Any, size: int) -> tuple[Tensor, Tensor]:
    """All-gather the keys and values of the whole sequence, in order, with one collective for both."""
    own_BKTW = torch.cat((key_BKTC, value_BKTV), dim=-1)
    B, K, T, W = own_BKTW.shape
    ranks = functional.wait_tensor(functional.all_gather_tensor(own_BKTW[None], 0, group)).view(size, B, K, 2, T // 2, W)
    ordered = torch.cat((ranks[:, :, :, 0], ranks[:, :, :, 1].flip(0)))  # (2 cp, B, K, T / 2, W)
    whole_BKSW = ordered.permute(1, 2, 0, 3, 4).reshape(B, K, size * T, W)
    key, value = whole_BKSW.split((key_BKTC.shape[-1], value_BKTV.shape[-1]), dim=-1)
    return key, value


def _own_sums(grad_key_BKSC: Tensor, grad_value_BKSV: Tensor, group: Any, size: int) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's keys and values, in fp32."""
    grad_BKTW = _scatter_sum(torch.cat((grad_key_BKSC.float(), grad_value_BKSV.float()), dim=-1), group, size)
    own_key, own_value = grad_BKTW.split((grad_key_BKSC.shape[-1], grad_value_BKSV.shape[-1]), dim=-1)
    return own_key, own_value


def _scatter_sum(whole_BKSW: Tensor, group: Any, size: int) -> Tensor:
    """The transpose of `_gather`: reduce-scatter to this rank's slices."""
    B, K, S, W = whole_BKSW.shape
    ordered = whole_BKSW.view(B, K, 2 * size, S // size // 2, W).permute(2, 0, 1, 3, 4)
    ranks = torch.stack((ordered[:size], ordered[size:].flip(0)), dim=3)  # (cp, B, K, 2, T / 2, W)
    own = functional.wait_tensor(functional.reduce_scatter_tensor(ranks.contiguous(), "sum", 0, group))
    return own.view(B, K, S // size, W)


@register_fake(attend_shared)
def _(query, key, value, first, last, scale, group, size):  # type: ignore[no-untyped-def]
    B, H, T, _ = query.shape
    return query.new_empty(B, H, T, value.shape[-1]), query.new_empty(B, H, T, dtype=torch.promote_types(query.dtype, torch.float32))


@register_fake(attend_shared_backward)
def _(grad, query, key, value, first, last, out, lse, scale, group, size, grad_lse=None):  # type: ignore[no-untyped-def]
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.scale, ctx.group, ctx.size = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad_out, grad_lse):  # type: ignore[no-untyped-def]
    grads = attend_shared_backward(grad_out, *ctx.saved_tensors, ctx.scale, ctx.group, ctx.size, grad_lse)
    return (*grads, None, None, None, None, None)


register_autograd(attend_shared, _backward, setup_context=_setup_context)
