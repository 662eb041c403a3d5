"""Data parallelism on FSDP2: copies or shards of weights, gradients and optimizer state, as ZeRO (arXiv:1910.02054) counts them.

| zero | optimizer state | gradients                      | weights                                     |
| 0    | on every rank   | on every rank                  | on every rank                               |
| 1    | sharded         | whole while they accumulate    | sharded, gathered for a whole step          |
| 2    | sharded         | sharded after each micro-batch | sharded, gathered for a whole micro-batch   |
| 3    | sharded         | sharded after each micro-batch | sharded, gathered layer by layer            |

Gradients are summed over the ranks, not averaged: the loss has been divided by the valid tokens of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from lmworks.model import Transformer
from lmworks.model.moe import Experts, MoE
from lmworks.model.transformer import Block
from lmworks.optim.groups import local
from lmworks.parallel.collectives import override_members
from lmworks.parallel.mesh import Ranks


def shard(model: Transformer, ranks: Ranks) -> None:
    """Shard every layer, and the remaining parameters, of one pipeline stage. The forward pass computes in `model.compute_dtype`;
    gradients are reduced in fp32."""
    zero = ranks.layout.zero
    narrow = model.compute_dtype if model.compute_dtype != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh, expert_mesh = _meshes(ranks)
    cut = _cuts(model, 1 if zero == 0 else ranks.size("efsdp" if ranks.size("ep") > 1 else "fsdp"))
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        if isinstance(block.ffn, MoE):
            if narrow is not None:  # a rounded router weight could select other experts
                _shard_apart(block, block.ffn.router, mesh=mesh, mp_policy=exact, reshard_after_forward=zero == 3)
            if ranks.size("ep") > 1:
                _shard_apart(
                    block, block.ffn.experts, mesh=expert_mesh, mp_policy=policy, reshard_after_forward=zero == 3, shard_placement_fn=cut
                )
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3, shard_placement_fn=cut)
    # Embedding, last norm and head stay gathered from the forward to the backward: the head is used after `hidden` has returned.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for method in ("hidden", "loss"):
        register_fsdp_forward_method(model, method)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            if zero:
                module.set_gradient_divide_factor(1.0)
            else:
                # Without sharding, torch divides by a given factor, even 1, into new memory (3% of a step on a CPU). Its default mean is
                # computed in place, and multiplied in place it is the sum again.
                copies = ranks.size("ecopies" if isinstance(module, Experts) and ranks.size("ep") > 1 else "loss")
                module.set_all_reduce_hook(partial(_multiply, copies))


def _multiply(by: int, gradient: Tensor) -> None:
    gradient.mul_(by)


def _shard_apart(block: Any, part: Any, **options: Any) -> None:
    """Shard a part of a layer separately, and gather it around the forward pass of the whole layer.

    Around its own call, FSDP2's hooks would run inside the layer: they would break its compiled graph, and run a second time in another
    state when the layer is recomputed.
    """
    override_members(part, {"__call__": _without_hooks, "wrap_forward": _wrap_forward})
    fully_shard(part, **options)
    register_fsdp_forward_method(part, "wrap_forward")
    block.forward = partial(part.wrap_forward, block.forward)


def _without_hooks(self: nn.Module, *args: Any) -> Any:
    return self.forward(*args)


def _wrap_forward(self: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    return forward(*args)


def _cuts(model: Transformer, shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """The dimension along which a parameter is sharded: the first; for experts whose number `shards` does not divide, the hidden size.

    Otherwise ten experts on 128 ranks would be stored on ten of them.
    """
    moe, hidden = model.config.moe, model.config.hidden_size
    assert hidden
    dims: dict[int, Shard] = {}
    if moe and hidden % shards == 0:
        for ffn in model.moe_layers():
            for name, parameter in ffn.experts._parameters.items():
                assert parameter is not None
                if local(parameter).shape[0] % shards:
                    dims[id(parameter)] = Shard(1 if name == "down" else 2)
    return lambda parameter: dims.get(id(parameter))


def set_last_micro_batch(model: Transformer, zero: int, last: bool) -> None:
    """Declare whether the next micro-batch is the last of its step: until then ZeRO-1 keeps unsharded weights and gradients."""
    if isinstance(model, FSDPModule) and zero <= 1:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def gather_unused(model: Transformer) -> None:
    """Gather the weights of multi-token prediction, which no forward pass uses in evaluation mode: FSDP2 (torch 2.13) fails in a backward
    pass that accumulates gradients over weights that it has never gathered."""
    for module in model.mtp.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def release(model: Transformer) -> None:
    """Free gathered weights, so that the next forward pass gathers the changed ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _meshes(ranks: Ranks) -> tuple[DeviceMesh, DeviceMesh]:
    """The meshes over which weights, and the weights of one expert, are replicated and sharded."""
    if ranks.layout.zero == 0:
        return ranks.mesh("loss", "one"), ranks.mesh("ecopies", "one")
    if ranks.size("dp_replicate") > 1:
        return ranks.mesh("dp_replicate", "fsdp"), ranks.mesh("dp_replicate", "efsdp")
    return ranks.mesh("fsdp"), ranks.mesh("efsdp")
