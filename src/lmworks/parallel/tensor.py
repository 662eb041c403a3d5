"""Tensor parallelism with sequence parallelism (Megatron-LM, arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198).

The ranks of `tp` shard every large matrix. Between the modules of a block the tokens are sharded too (sequence parallelism), and with them
the norms, the residual additions and their saved activations. A module all-gathers the tokens, computes with its own heads or hidden
units, and reduce-scatters its output, which is a sum over ranks:

| module                     | input      | sharded over                         | output                     |
| embedding                  |            | vocabulary                           | reduce-scatter             |
| attention                  | all-gather | heads: query, key, value, gate; output | reduce-scatter           |
| latent attention           |            | heads: query_up, kv_up; output       | reduce-scatter             |
| gated delta, lightning     | all-gather | heads: all but the last; output      | reduce-scatter             |
| short convolution          | all-gather | channels: all but the last; output   | reduce-scatter             |
| Mamba-2 (`mamba.py`)       | all-gather | heads: input, dt_bias, A_log, skip, gate norm; projection | reduce-scatter |
| dense and shared ffn       | all-gather | hidden units: gate, up; down         | reduce-scatter             |
| experts (`experts.py`)     | all-gather | hidden units: gate, up; down         | reduce-scatter             |
| head and loss              | all-gather | vocabulary                           | all-reduce of max and sum  |

Replicated are the norms, the router and the gate of shared experts, the projection of multi-token prediction, those of latent experts, the
down-projections of latent attention and the filters of Mamba-2. Norms, projections and filters process a rank's own tokens, heads or hidden
units of experts, so their gradients are summed; the router and that gate compute the same on all ranks. Latent attention gathers its
latents instead of the hidden states. A norm over all heads has the weights of a rank's own heads and sums the squares of all ranks, forward
and backward (OLMo 2; lightning attention; the gate norm of Mamba-2 with one group). All heads of latent attention share one rotated key,
and each rank uses it for its own heads only: that gather must sum gradients. Without it the forward pass would be right and the gradients
wrong.

Shapes: B batch, T tokens, D hidden, M tokens of a chunk, V own vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lmworks.errors import UserError
from lmworks.host.devices import at_least_fp32
from lmworks.model import Transformer
from lmworks.model.attention import Attention
from lmworks.model.cache import Cache
from lmworks.model.gated_conv import GatedConv
from lmworks.model.gated_delta import GatedDeltaNet
from lmworks.model.layers import MLP, Linear, RMSNorm, SwiGLU
from lmworks.model.lightning import Lightning
from lmworks.model.loss import IGNORE, logits_gradient, soft_cap
from lmworks.model.mamba2 import GatedNorm, Hybrid, Mamba2
from lmworks.model.mla import LatentAttention
from lmworks.model.moe import MoE
from lmworks.model.mtp import MtpLayer
from lmworks.model.router import Router, Routing
from lmworks.model.transformer import LayerStats
from lmworks.parallel import collectives, mamba
from lmworks.parallel.collectives import override_members, use_local_parameters
from lmworks.parallel.mesh import Ranks

_TOKENS = 1  # the dimension of T


@dataclass
class Stream:
    """The residual stream of the ranks of `group`: with `sharded`, each rank has its own tokens; otherwise all ranks have all tokens.

    It is sharded in training. If the number of tokens does not divide, as for one cached token, it is replicated, without gradients.
    """

    group: Any
    size: int
    sharded: bool = True

    def begin(self, tokens: int) -> None:
        self.sharded = tokens % self.size == 0
        if not self.sharded and torch.is_grad_enabled():
            raise UserError(f"layout.tp {self.size} does not divide sequences of {tokens:,} tokens; use a multiple of {self.size}")

    def enter(self, x_BTD: Tensor) -> Tensor:
        """All tokens, as the input of a module whose computation is sharded."""
        return collectives.gather(x_BTD, _TOKENS, self.group) if self.sharded else collectives.identity_allreduce_grad(x_BTD, self.group)

    def leave(self, x_BTD: Tensor) -> Tensor:
        """The sum of the ranks' outputs, as own tokens."""
        return collectives.scatter_sum(x_BTD, _TOKENS, self.group) if self.sharded else collectives.all_sum(x_BTD, self.group)

    def whole(self, x_BTD: Tensor) -> Tensor:
        """All tokens, with which all ranks compute the same."""
        return collectives.gather_alike(x_BTD, _TOKENS, self.group) if self.sharded else x_BTD


def shard_tensors(model: Transformer, ranks: Ranks) -> None:
    """Shard a model on the meta device, or one pipeline stage of it, over the ranks of `tp`, except the weights of experts."""
    size, mesh = ranks.size("tp"), ranks.mesh("tp")
    stream = Stream(ranks.group("tp"), size)
    forwards = _forwards(stream)
    of_mamba = mamba.forwards(model.config.mamba, size, ranks.rank("tp"), stream.group) if model.config.mamba else {}
    over_heads: set[nn.Module | None] = set()
    for module in list(model.modules()):
        if isinstance(module, Attention):
            if model.config.qk_norm_over == "all_heads":
                over_heads |= {module.query_norm, module.key_norm}
            _column_parallel(mesh, module.query, module.key, module.value, module.gate)
            _row_parallel(mesh, module.output)
            if module.sinks is not None:
                _place(module, mesh, Shard(0))
        elif isinstance(module, LatentAttention):
            _column_parallel(mesh, module.query, module.query_up, module.kv_up)
            _row_parallel(mesh, module.output)
            _replicated(mesh, module.query_down, module.kv_down)
            for name in ("query", "query_down", "kv_down"):
                if (part := getattr(module, name)) is not None:
                    override_members(part, {"forward": forwards[name]})
        elif isinstance(module, GatedDeltaNet | GatedConv):
            _column_parallel(mesh, *(getattr(module, name) for name in module.column))
            _row_parallel(mesh, module.output)
            for part in (module, *(getattr(module, name) for name in module.heads)):
                _place(part, mesh, Shard(0))
        elif isinstance(module, Lightning):
            own = module.heads // size
            module.own = slice(own * ranks.rank("tp"), own * (ranks.rank("tp") + 1))
            module.configure(module.log_decay_H.device)
            _column_parallel(mesh, module.qkv, module.gate)
            _row_parallel(mesh, module.projection)
            over_heads.add(module.output_norm)
        elif isinstance(module, Mamba2):
            module.config = module.config.of_rank(size)
            _column_parallel(mesh, module.input)
            _row_parallel(mesh, module.projection)
            _replicated(mesh, module.conv)
            _place(module, mesh, Shard(0))
            override_members(module.input, {"forward": of_mamba["input"]})
            override_members(module.conv, {"forward": of_mamba["conv"]})
        elif isinstance(module, GatedNorm):
            _place(module, mesh, Shard(0))
            if module.groups % size:
                override_members(module, {"normalize": forwards[GatedNorm]})
            else:
                module.groups //= size
        elif isinstance(module, SwiGLU | MLP):
            _column_parallel(mesh, module.gate if isinstance(module, SwiGLU) else None, module.up)
            _row_parallel(mesh, module.down)
        elif isinstance(module, Router):
            _place(module, mesh, Replicate(), same_computation=True)
            override_members(module, {"forward": forwards[Router]})
        elif isinstance(module, MoE):
            _replicated(mesh, module.latent_down, module.latent_up)
            if module.shared_gate is not None:
                _place(module.shared_gate, mesh, Replicate(), same_computation=True)
                override_members(module.shared_gate, {"forward": forwards["shared_gate"]})
        elif isinstance(module, RMSNorm) and module in over_heads:
            module.size //= size
            _place(module, mesh, Shard(0))
            override_members(module, {"forward": forwards["norm_over_heads"]})
        elif isinstance(module, RMSNorm):
            _replicated(mesh, module)
        elif isinstance(module, MtpLayer):
            _replicated(mesh, module.projection)
    for block in model.every_block():
        for part in (one for one in (block.attention, block.ffn) if one is not None):
            override_members(part, {"forward": next(forward for kind, forward in forwards.items() if kind in type(part).__mro__)})
    _shard_ends(model, ranks, stream)


def place(parameter: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """Turn a parameter on the meta device into a distributed one."""
    assert parameter.is_meta
    shape, _ = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    part = torch.empty(shape, dtype=parameter.dtype, device="meta")
    whole = DTensor.from_local(part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _place(module: nn.Module, mesh: DeviceMesh, placement: Placement, same_computation: bool = False) -> None:
    """Distribute a module's own parameters, and make it compute with its local parts. `same_computation`: all ranks compute the same."""
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            module._parameters[name] = place(parameter, mesh, [placement])
    use_local_parameters(module, {name: [Replicate()] for name in module._parameters} if same_computation else None)


def _column_parallel(mesh: DeviceMesh, *projections: Linear | None) -> None:
    """Shard the outputs: from the full input to this rank's outputs."""
    for projection in filter(None, projections):
        _place(projection, mesh, Shard(0))
        _place_adapter(projection, mesh, Replicate(), Shard(0))


def _row_parallel(mesh: DeviceMesh, projection: Linear) -> None:
    """Shard the inputs: from this rank's inputs to a partial sum of the output. Each rank adds its share of a bias."""
    bias = projection._parameters.pop("bias", None)
    _place(projection, mesh, Shard(1))
    projection._parameters["bias"] = None if bias is None else place(bias, mesh, [Replicate()])
    if bias is not None:
        use_local_parameters(projection)
        override_members(projection, {"forward": _with_share_of_bias(mesh.size())})
    _place_adapter(projection, mesh, Shard(1), Replicate())


def _with_share_of_bias(ranks: int) -> Any:
    def forward(self: Linear, x: Tensor) -> Tensor:
        assert self.bias is not None
        y = F.linear(x, self.weight.to(x.dtype)) + self.bias.to(x.dtype) / ranks
        return y if self.lora is None else y + self.lora(x)

    return forward


def _place_adapter(projection: nn.Module, mesh: DeviceMesh, a: Placement, b: Placement) -> None:
    """Distribute the adapter of a projection so that it has the same inputs and outputs. What is replicated sees a part of the outputs or
    of the inputs on each rank, and has a partial gradient."""
    if isinstance(projection, Linear) and (adapter := projection.lora) is not None:
        adapter._parameters["A"] = place(adapter.A, mesh, [a])
        adapter._parameters["B"] = place(adapter.B, mesh, [b])
        use_local_parameters(adapter)


def _replicated(mesh: DeviceMesh, *modules: nn.Module | None) -> None:
    """Replicate: the inputs are this rank's tokens or heads, so each rank has a partial gradient."""
    for module in filter(None, modules):
        _place(module, mesh, Replicate())
        _place_adapter(module, mesh, Replicate(), Replicate())


def _forwards(stream: Stream) -> dict[Any, Any]:
    """The forward methods, with communication, of the modules of a block and of the projections of latent attention."""

    def block_part(kind: type[nn.Module]) -> Callable[..., Tensor]:
        """A module that takes all tokens and gives this rank's share of a sum."""
        return lambda self, x_BTD, *context: stream.leave(kind.forward(self, stream.enter(x_BTD), *context))

    def latent_attention(self: LatentAttention, x_BTD: Tensor, *context: Any) -> Tensor:
        return stream.leave(LatentAttention.forward(self, x_BTD, *context))

    def over_ranks(self: RMSNorm | GatedNorm, x: Tensor) -> Tensor:
        """Vectors of which each rank has an equal part, divided by their root mean square, in at least fp32."""
        wide = at_least_fp32(x)
        squares = collectives.identity_allreduce_grad(wide.square().sum(-1, keepdim=True), stream.group)
        mean = collectives.all_sum(squares, stream.group) / (x.shape[-1] * stream.size)
        return wide * torch.rsqrt(mean + self.eps)

    def norm_over_heads(self: RMSNorm, x: Tensor) -> Tensor:
        return over_ranks(self, x).to(x.dtype) * self.weight.to(x.dtype)

    def query(self: Linear, x_BTD: Tensor) -> Tensor:
        return Linear.forward(self, stream.enter(x_BTD))

    def down(self: Linear, x_BTD: Tensor) -> Tensor:
        return stream.enter(Linear.forward(self, x_BTD))

    def moe(self: MoE, x_BTD: Tensor) -> tuple[Tensor, Routing]:
        out_BTD, routing = MoE.forward(self, stream.enter(x_BTD))
        return stream.leave(out_BTD), routing

    def router(self: Router, x_BTD: Tensor) -> Routing:
        """All ranks compute the same. The gradient of the input is summed over ranks later; that of the weights is summed here."""
        routing = Router.forward(self, collectives.scale_grad_by_group(x_BTD, stream.group))
        return replace(routing, weights=collectives.identity_allreduce_grad(routing.weights, stream.group))

    def shared_gate(self: Linear, x: Tensor) -> Tensor:
        """As the router: it multiplies what is a partial sum on each rank."""
        gate_BT1 = Linear.forward(self, collectives.scale_grad_by_group(x, stream.group))
        return collectives.identity_allreduce_grad(gate_BT1, stream.group)

    return {
        # subclasses first
        **{kind: block_part(kind) for kind in (Hybrid, Attention, GatedConv, GatedDeltaNet, Lightning, Mamba2, SwiGLU, MLP)},
        LatentAttention: latent_attention, MoE: moe, Router: router, "query": query, "query_down": down, "kv_down": down,
        "shared_gate": shared_gate, "norm_over_heads": norm_over_heads, GatedNorm: over_ranks,
    }  # fmt: skip


def _shard_ends(model: Transformer, ranks: Ranks, stream: Stream) -> None:
    """Shard the embedding and the head that this stage has over the vocabulary, and override the loss and the outputs of the model."""
    config, mesh = model.config, ranks.mesh("tp")
    assert config.vocab_size
    own = config.vocab_size // stream.size
    first = own * ranks.rank("tp")

    def embed(self: Transformer, tokens_BT: Tensor) -> Tensor:
        stream.begin(tokens_BT.shape[_TOKENS])
        local_BT = tokens_BT - first
        elsewhere_BT = (local_BT < 0) | (local_BT >= own)
        found_BTD = Transformer.embed(self, local_BT.masked_fill(elsewhere_BT, 0))
        return stream.leave(found_BTD.masked_fill(elsewhere_BT[..., None], 0))

    def hidden(self: Transformer, *args: Any, **kwargs: Any) -> tuple[Tensor, LayerStats]:
        hidden_BTD, layers = Transformer.hidden(self, *args, **kwargs)
        return stream.whole(hidden_BTD), layers

    def logits(self: Transformer, hidden_BTD: Tensor) -> Tensor:
        return collectives.gather_alike(
            Transformer.logits(self, collectives.identity_allreduce_grad(hidden_BTD, stream.group)), -1, stream.group
        )

    def head_loss(self: Transformer, hidden_BTD: Tensor, labels_BT: Tensor, weights_BT: Tensor | None = None) -> Any:
        return Transformer.head_loss(self, stream.enter(hidden_BTD), labels_BT, weights_BT)

    def cache(self: Transformer, rows: int, capacity: int, behind: int = 0) -> Cache:
        # its config now: a phase may have changed the window
        return Cache(self.config, rows, capacity, self.embedding.weight.device, self.compute_dtype, stream.size, behind)

    for end in (model.embedding, model.head):
        if end is not None:
            _place(end, mesh, Shard(0))
    if config.tie_word_embeddings and model.embedding is not None and model.head is not None:
        model.head._parameters["weight"] = model.embedding._parameters["weight"]
    model._chunk_loss = partial(chunk_loss, first=first, group=stream.group)
    override_members(model, {"embed": embed, "hidden": hidden, "logits": logits, "head_loss": head_loss, "cache": cache})


def chunk_loss(
    logits_MV: Tensor, labels_M: Tensor, softcap: float, z_weight: float, needs_grad: bool, weights_M: Tensor | None = None, *,
    first: int, group: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`lmworks.model.loss.chunk_loss` for logits whose vocabulary is sharded over `group`; this rank's part begins at id `first`.

    The sums are the same on all ranks; the gradient is that of this rank's logits.
    """
    capped = soft_cap(at_least_fp32(logits_MV), softcap)
    valid = labels_M != IGNORE
    local_M = labels_M.long() - first
    here = (local_M >= 0) & (local_M < capped.shape[1])
    target = local_M.masked_fill(~here, 0)[:, None]
    most_M = collectives.all_max(capped.amax(-1), group)
    sums_2M = torch.stack(((capped - most_M[:, None]).exp().sum(-1), capped.gather(1, target)[:, 0] * here))
    total_M, score_M = collectives.all_sum(sums_2M, group).unbind()
    lse_M = total_M.log() + most_M
    ce = (lse_M - score_M) * valid
    z = (lse_M.square() * valid).sum()
    if not needs_grad:
        return ce, z, None
    hit = -here[:, None].to(capped.dtype)
    probability_MV = (capped - lse_M[:, None]).exp_()
    factor_M = valid if weights_M is None else valid * weights_M
    return ce, z, logits_gradient(capped, probability_MV, lse_M, target, hit, factor_M, softcap, z_weight).to(logits_MV.dtype)
