"""Expert parallelism: the ranks of `ep` hold different experts, and tokens are sent to them and back (GShard, arXiv:2006.16668).

No token is dropped, however uneven the load: ranks first exchange the numbers of rows, then the rows. The rows of an expert are ordered
by source rank and token, so that sums over them are deterministic. Expert weights receive the tokens of all ranks of `ep`; their gradients
are then summed over the ranks of `ecopies` (`data.py`). Under tensor parallelism the ranks of `tp` send the same tokens, each to the ranks
that hold its own slice of the experts' hidden units.

Shapes: N tokens, D hidden, K experts per token, M = N * K rows, P ranks of ep, E own experts, R received rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from lmworks.model import Transformer
from lmworks.model.layers import Adapter
from lmworks.model.moe import Experts, combine, dispatch, has_grouped_mm, run_sorted, run_sorted_plain
from lmworks.model.router import Routing
from lmworks.parallel import collectives
from lmworks.parallel.collectives import override_members, use_local_parameters
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.tensor import place


def shard_experts(model: Transformer, ranks: Ranks) -> None:
    """Shard the experts of a model on the meta device: whole experts over the ranks of `ep`, their hidden units over those of `tp`."""
    ep = ranks.size("ep")
    axes = [axis for axis in ("ep", "tp") if ranks.size(axis) > 1]
    mesh = ranks.mesh(*axes)
    hidden: dict[str, Placement] = {"ep": Shard(0), "tp": Shard(1)}
    replicated: dict[str, Placement] = {"ep": Shard(0), "tp": Replicate()}
    places: dict[str, dict[str, Placement]] = {
        "gate": hidden, "up": hidden, "down": hidden | {"tp": Shard(2)}, "gate_bias": hidden, "up_bias": hidden, "down_bias": replicated,
    }  # fmt: skip
    forward = _exchanged(ranks.group("ep"), ep) if ep > 1 else Experts.forward
    for ffn in model.moe_layers():
        for name, parameter in list(ffn.experts._parameters.items()):
            if parameter is not None:
                ffn.experts._parameters[name] = place(parameter, mesh, [places[name][axis] for axis in axes])
        ffn.experts.bias_share = 1 / ranks.size("tp")
        for name, adapter in ffn.experts.named_children():
            assert isinstance(adapter, Adapter)
            # gate and up shard their outputs over tp, and down its inputs
            tp_dims = (2, None) if name == "down_lora" else (None, 1)
            for key, dim in zip("AB", tp_dims, strict=True):
                over = {"ep": Shard(0), "tp": Replicate() if dim is None else Shard(dim)}
                adapter._parameters[key] = place(getattr(adapter, key), mesh, [over[axis] for axis in axes])
            use_local_parameters(adapter)
        use_local_parameters(ffn.experts)
        override_members(ffn.experts, {"forward": forward})


def _exchanged(group: Any, ranks: int) -> Any:
    def forward(self: Experts, x_ND: Tensor, routing: Routing) -> Tensor:
        rows_MD, weights_M, places = dispatch(x_ND, routing)
        sent_PE = routing.counts.long().view(ranks, -1)
        received_PE = collectives.exchange(sent_PE, [1] * ranks, [1] * ranks, group)
        # Synchronizes with the host. To the compiler these are symbolic sizes, so that other numbers cause no recompilation.
        splits = torch.stack((sent_PE.sum(1), received_PE.sum(1))).flatten().tolist()
        sent, received = splits[:ranks], splits[ranks:]
        # rows arrive sorted by rank and are computed sorted by expert
        experts_R = torch.arange(sent_PE.shape[1], device=x_ND.device).repeat(ranks)
        experts_R = experts_R.repeat_interleave(received_PE.flatten(), output_size=sum(received))
        order_R = experts_R.argsort(stable=True)
        own_RD = _reorder(collectives.exchange(rows_MD, received, sent, group), order_R)
        own_weights_R = _reorder(collectives.exchange(weights_M, received, sent, group), order_R)
        run = run_sorted if has_grouped_mm(x_ND) and not self.plain else run_sorted_plain
        ends_E = received_PE.sum(0).cumsum(0).to(torch.int32)
        out_RD = run(own_RD, own_weights_R, ends_E, *self.weights(x_ND.dtype), self.adapters(), self.form(x_ND.dtype))
        back_RD = _reorder(out_RD, order_R.argsort())
        return combine(collectives.exchange(back_RD, sent, received, group), places)

    return forward


def _reorder(rows: Tensor, order: Tensor) -> Tensor:
    """A permutation whose gradient is a permutation too, not a scatter-add, which would be nondeterministic."""
    return _Permute.apply(rows, order)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return grad[order.argsort()], None
