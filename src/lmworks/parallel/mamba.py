"""Tensor parallelism of the joined projection and the convolution of Mamba-2, whose rows are not in the order of the heads.

The rows of the projection are those of the gate, the inputs, B, C and the time steps, each of all heads or groups. It is stored as any
other matrix, an equal share of consecutive rows on each rank, so that checkpoints fit every layout. A rank computes the outputs of the rows
that it stores, and in an all-to-all the ranks receive those of their own heads, and of the groups that these belong to; ranks with heads of
the same group all receive B and C of it, and the gradients of these are summed where the rows are stored. Filters are few numbers: every
rank has all, and uses those of its own channels.

Shapes: B batch, T time, R rows of the projection that a rank stores, X own channels of the convolution, W its width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lmworks.model.layers import Linear
from lmworks.model.short_conv import Filters
from lmworks.parallel import collectives
from lmworks.recipe.schema.mixers import Mamba


def forwards(sizes: Mamba, tp: int, rank: int, group: Any) -> dict[str, Any]:
    """The forward methods of `Mamba2.input` and `Mamba2.conv` on one of `tp` ranks, with `sizes` of the whole model."""
    wanted = [own_rows(sizes, tp, one) for one in range(tp)]
    inner = sizes.inner_size
    exchanged = exchange(wanted, inner + sizes.conv_size + sizes.num_heads, rank, group)
    channels = [slice(rows.start - inner, rows.stop - inner) for rows in wanted[rank][1:4]]

    def project(self: Linear, x_BTD: Tensor) -> Tensor:
        return exchanged(Linear.forward(self, x_BTD))

    def convolve(self: Filters, x_BTX: Tensor, positions_BT: Tensor, before_BWX: Tensor | None) -> Tensor:
        weight_X1W = torch.cat([self.weight[own] for own in channels])
        bias_X = None if self.bias is None else torch.cat([self.bias[own] for own in channels])
        return self.convolve(x_BTX, positions_BT, before_BWX, weight_X1W, bias_X)

    return {"input": project, "conv": convolve}


def own_rows(sizes: Mamba, tp: int, rank: int) -> list[range]:
    """The rows of the joined projection that one of `tp` ranks computes with: of the gate, the inputs, B, C and the time steps."""
    own, found, begin = sizes.of_rank(tp), [], 0
    heads = sizes.inner_size, rank * own.inner_size, own.inner_size  # all, the first of this rank, and how many it has
    groups = sizes.n_groups * sizes.state_size, sizes.n_groups * rank // tp * sizes.state_size, own.n_groups * own.state_size
    steps = sizes.num_heads, rank * own.num_heads, own.num_heads
    for whole, first, count in (heads, heads, groups, groups, steps):
        found.append(range(begin + first, begin + first + count))
        begin += whole
    return found


def exchange(wanted: Sequence[Sequence[range]], rows: int, rank: int, group: Any) -> Callable[[Tensor], Tensor]:
    """From the outputs (B, T, R) of the rows that each rank of `group` stores, an equal share of `rows`, to those of the rows that it
    wants, in their order. `wanted`: ascending rows of each rank."""
    ranks = len(wanted)
    assert rows % ranks == 0
    share = rows // ranks
    stored = [range(share * one, share * (one + 1)) for one in range(ranks)]
    edges = {edge for parts in (*wanted, stored) for part in parts for edge in (part.start, part.stop)}
    pieces = [range(*ends) for ends in pairwise(sorted(edges))]  # each is stored by one rank, and wanted by a rank whole or not at all

    def passed(source: int, target: int) -> list[range]:
        return [piece for piece in pieces if piece[0] in stored[source] and any(piece[0] in part for part in wanted[target])]

    here = [piece for piece in pieces if piece[0] in stored[rank]]
    sent = [passed(rank, target) for target in range(ranks)]
    received = [passed(source, rank) for source in range(ranks)]
    places = [here.index(piece) for target in sent for piece in target]
    widths, arriving = [len(piece) for piece in here], [len(piece) for source in received for piece in source]
    counts_in, counts_out = ([sum(map(len, part)) for part in parts] for parts in (received, sent))

    def run(y_BTR: Tensor) -> Tensor:
        B, T, _ = y_BTR.shape
        parts = y_BTR.split(widths, dim=-1)
        flat = torch.cat([parts[place].flatten() for place in places])
        flat = collectives.exchange(flat, [B * T * count for count in counts_in], [B * T * count for count in counts_out], group)
        return torch.cat([part.view(B, T, -1) for part in flat.split([B * T * width for width in arriving])], dim=-1)

    return run
