"""Mixture of experts: routing, dispatch of tokens to experts, grouped computation, combination, shared experts.

Shapes: N tokens, D hidden, E experts, F expert hidden, K experts per token, M = N * K rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmworks.model.layers import Adapter, Linear, feed_forward, relu2
from lmworks.model.operators import operator, register_autograd, register_fake
from lmworks.model.router import Router, Routing
from lmworks.recipe.schema.model import ROUTER_EPS, Moe

Adapters = tuple[Adapter | None, Adapter | None, Adapter | None]
Weights = tuple[Tensor | None, Tensor, Tensor]
_NO_ADAPTERS: Adapters = (None, None, None)
_ALIGNED = 16  # bytes: grouped products need rows that are a multiple


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) with gate at most `limit` and up between minus and plus `limit` (gpt-oss, arXiv:2508.10925;
    alpha 1.702 makes the product of gate and sigmoid nearly GELU)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


def squared_relu(gate: None, up: Tensor) -> Tensor:
    """relu(up)^2, of experts without a gate."""
    return relu2(up)


class Form(NamedTuple):
    """What experts have besides their matrices: the function of gate and up, and the biases (E, F), (E, F) and (E, D), or none."""

    activation: Callable[[Any, Tensor], Tensor] = swiglu
    gate_EF: Tensor | None = None
    up_EF: Tensor | None = None
    down_ED: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """SwiGLU without biases."""
        return self.activation is swiglu and self.gate_EF is None


_PLAIN = Form()


class Experts(nn.Module):
    """E SwiGLU experts in three stacked weights, in some models with biases; or experts with a squared ReLU, in two without a gate."""

    def __init__(self, moe: Moe, size: int, activation: str = "silu") -> None:
        super().__init__()
        gated = activation != "relu2"
        self.activation: Callable[[Any, Tensor], Tensor] = swiglu if gated else squared_relu
        if moe.swiglu_alpha is not None and moe.swiglu_limit is not None:
            self.activation = partial(clamped_swiglu, alpha=moe.swiglu_alpha, limit=moe.swiglu_limit)
        self.gate = nn.Parameter(torch.empty(moe.n_routed_experts, moe.moe_intermediate_size, size)) if gated else None
        self.up = nn.Parameter(torch.empty(moe.n_routed_experts, moe.moe_intermediate_size, size))
        self.down = nn.Parameter(torch.empty(moe.n_routed_experts, size, moe.moe_intermediate_size))
        count = moe.n_routed_experts
        self.gate_bias = nn.Parameter(torch.empty(count, moe.moe_intermediate_size)) if moe.add_bias else None
        self.up_bias = nn.Parameter(torch.empty(count, moe.moe_intermediate_size)) if moe.add_bias else None
        self.down_bias = nn.Parameter(torch.empty(count, size)) if moe.add_bias else None
        self.bias_share = 1.0  # of `down_bias` that this rank adds, if several have a part of the hidden units
        self.gate_lora: Adapter | None = None
        self.up_lora: Adapter | None = None
        self.down_lora: Adapter | None = None
        self.joined: nn.Parameter | None = None  # gate and up (E, 2 F, D) as one stack (`lmworks.inference.model`)
        self.plain = False

    def forward(self, x_ND: Tensor, routing: Routing) -> Tensor:
        form = self.form(x_ND.dtype)
        if self.joined is not None:
            return experts_joined(x_ND, routing, self.joined, self.down, form)
        run = experts_fast if has_grouped_mm(x_ND) and not self.plain else experts_plain
        return run(x_ND, routing, *self.weights(x_ND.dtype), self.adapters(), form)

    def weights(self, dtype: torch.dtype) -> Weights:
        """Gate, if there is one, up and down in the type of the activations."""
        return None if self.gate is None else self.gate.to(dtype), self.up.to(dtype), self.down.to(dtype)

    def form(self, dtype: torch.dtype) -> Form:
        """The activation, and the biases in the type of the activations."""
        gate, up, down = (None if bias is None else bias.to(dtype) for bias in (self.gate_bias, self.up_bias, self.down_bias))
        return Form(self.activation, gate, up, down if down is None or self.bias_share == 1 else down * self.bias_share)

    def adapters(self) -> Adapters:
        """The adapters of gate, up and down."""
        return self.gate_lora, self.up_lora, self.down_lora


class MoE(nn.Module):
    """The feed-forward block of an MoE layer; returns its output and the routing. In some models the routed experts work at a narrower
    width, between two projections (LatentMoE, arXiv:2601.18089). `eps` is added to the sum by which the weights of a token's
    experts are divided."""

    def __init__(self, moe: Moe, size: int, activation: str = "silu", eps: float = ROUTER_EPS) -> None:
        super().__init__()
        self.router = Router(moe, size, eps)
        self.experts = Experts(moe, moe.moe_latent_size or size, activation)
        self.latent_down = Linear(size, moe.moe_latent_size) if moe.moe_latent_size else None
        self.latent_up = Linear(moe.moe_latent_size, size) if moe.moe_latent_size else None
        shared = moe.moe_intermediate_size * moe.n_shared_experts
        self.shared = feed_forward(size, shared, activation) if shared else None
        self.shared_gate = Linear(size, 1) if moe.shared_expert_gate else None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Routing]:
        routing = self.router(x_BTD)
        read = x_BTD if self.latent_down is None else self.latent_down(x_BTD)
        out = self.experts(read.reshape(-1, read.shape[-1]), routing).view_as(read)
        out = out if self.latent_up is None else self.latent_up(out)
        if self.shared is None:
            return out, routing
        shared_BTD = self.shared(x_BTD)
        return out + (shared_BTD if self.shared_gate is None else shared_BTD * self.shared_gate(x_BTD).sigmoid()), routing


def has_grouped_mm(x: Tensor) -> bool:
    """Whether PyTorch supports grouped products of this dtype on this device: bf16 everywhere, narrower types than fp64 only on CPU."""
    return x.dtype == torch.bfloat16 or (x.device.type == "cpu" and x.dtype != torch.float64)


def grouped_mm(x_MD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """The rows of each expert times its transposed weight: (M, F)."""
    many = x_MD.dtype != torch.float32 and x_MD.shape[0] > _ROWS // 2 * weight_EFD.shape[0]
    if x_MD.device.type == "cpu" and (many or torch.compiler.is_compiling()):
        return grouped_mm_cpu(x_MD, weight_EFD, ends_E)
    return F.grouped_mm(x_MD, weight_EFD.transpose(1, 2), offs=ends_E)


def adapted_mm(x_MD: Tensor, weight_EFD: Tensor, ends_E: Tensor, adapter: Adapter | None) -> Tensor:
    """`grouped_mm` with the low-rank adapters of the experts (E, r, D) and (E, F, r)."""
    out_MF = grouped_mm(x_MD, weight_EFD, ends_E)
    if adapter is None:
        return out_MF
    spare = -adapter.rank % (_ALIGNED // x_MD.dtype.itemsize)  # columns of zeros, which products do not change by
    a_ErD, b_EFr = F.pad(adapter.A, (0, 0, 0, spare)).to(x_MD.dtype), F.pad(adapter.B, (0, spare)).to(x_MD.dtype)
    return out_MF + grouped_mm(grouped_mm(adapter.dropped(x_MD), a_ErD, ends_E), b_EFr, ends_E) * adapter.scale


def adapted_linear(x: Tensor, weight: Tensor, adapter: Adapter | None, expert: int) -> Tensor:
    """The same for the rows of one expert."""
    if adapter is None:
        return x @ weight.T
    low = adapter.dropped(x) @ adapter.A[expert].T.to(x.dtype)
    return x @ weight.T + low @ adapter.B[expert].T.to(x.dtype) * adapter.scale


def experts_fast(
    x_ND: Tensor, routing: Routing, gate_EFD: Tensor | None, up_EFD: Tensor, down_EDF: Tensor, adapters: Adapters = _NO_ADAPTERS,
    form: Form = _PLAIN,
) -> Tensor:  # fmt: skip
    """Sort rows by expert and compute all experts at once; the sort makes sums deterministic."""
    rows_MD, weights_M, places = dispatch(x_ND, routing)
    ends_E = routing.counts.cumsum(0).to(torch.int32)
    return combine(run_sorted(rows_MD, weights_M, ends_E, gate_EFD, up_EFD, down_EDF, adapters, form), places)


def experts_joined(x_ND: Tensor, routing: Routing, joined_EXD: Tensor, down_EDF: Tensor, form: Form = _PLAIN) -> Tensor:
    """`experts_fast` with gate and up in one stack; without gradients."""
    if _all_are_faster(x_ND, routing, joined_EXD, form):
        return _all_experts(x_ND, routing, joined_EXD, down_EDF)
    K = routing.experts.shape[1]
    chosen_M = routing.experts.reshape(-1)
    order_M = chosen_M.argsort(stable=True)
    ends_E = routing.counts.cumsum(0, dtype=torch.int32)
    gate_MF, up_MF = grouped_mm(x_ND.index_select(0, order_M // K), joined_EXD, ends_E).chunk(2, dim=-1)
    if form.is_plain:
        out_MD = grouped_mm(F.silu(gate_MF).mul_(up_MF), down_EDF, ends_E)
    else:
        expert_M = chosen_M[order_M]
        for part_MF, bias_EF in ((gate_MF, form.gate_EF), (up_MF, form.up_EF)):
            if bias_EF is not None:
                part_MF += bias_EF[expert_M]
        out_MD = grouped_mm(form.activation(gate_MF, up_MF), down_EDF, ends_E)
        if form.down_ED is not None:
            out_MD += form.down_ED[expert_M]
    return _sum_rows(out_MD, order_M.argsort(), K, routing.weights.to(x_ND.dtype))


_MOST_ROWS, _MOST_BYTES = 8, 1 << 24  # per expert, and of the joined matrices of a layer: measured on an Xeon with AMX (LOG.md)


def _all_are_faster(x_ND: Tensor, routing: Routing, joined_EXD: Tensor, form: Form) -> bool:
    """Whether all experts together take less time for each token than those that it has chosen, as in decoding small models in bf16 on a
    CPU: most experts have a row anyway, and oneDNN takes longer to begin a product of a few rows than to compute it."""
    if x_ND.device.type != "cpu" or x_ND.dtype != torch.bfloat16 or not form.is_plain:
        return False
    E, rows = joined_EXD.shape[0], routing.experts.numel()
    return E <= rows <= _MOST_ROWS * E and joined_EXD.nbytes <= _MOST_BYTES


def _all_experts(x_ND: Tensor, routing: Routing, joined_EXD: Tensor, down_EDF: Tensor) -> Tensor:
    """`experts_joined` by two products for all experts: what a token has not chosen counts 0."""
    N, E = x_ND.shape[0], joined_EXD.shape[0]
    gate_NEF, up_NEF = F.linear(x_ND, joined_EXD.flatten(0, 1)).view(N, E, 2, -1).unbind(2)
    weights_NE = torch.zeros_like(gate_NEF[..., 0]).scatter_(1, routing.experts, routing.weights.to(x_ND.dtype))
    hidden_NEF = F.silu(gate_NEF).mul_(up_NEF).mul_(weights_NE[..., None])
    out_END = hidden_NEF.transpose(0, 1) @ down_EDF.transpose(1, 2)
    return out_END.masked_fill_((weights_NE == 0).T[..., None], 0.0).sum(0)  # 0 times what is not finite is not


class Places(NamedTuple):
    """The permutation that sorts the N * K rows by expert, and its inverse."""

    order_M: Tensor
    place_M: Tensor
    K: int


def dispatch(x_ND: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Places]:
    """A row (M, D) and its weight (M,) for each chosen expert of each token, sorted by expert; and the permutation."""
    order_M = routing.experts.reshape(-1).argsort(stable=True)
    place_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(order_M.numel(), device=order_M.device))
    places = Places(order_M, place_M, routing.experts.shape[1])
    return _Dispatch.apply(x_ND, *places), routing.weights.reshape(-1)[order_M].to(x_ND.dtype), places


def combine(rows_MD: Tensor, places: Places) -> Tensor:
    """Each token's sum (N, D) over its rows."""
    out: Tensor = _Combine.apply(rows_MD, *places)
    return out


def run_sorted(
    rows_MD: Tensor, weights_M: Tensor, ends_E: Tensor, gate_EFD: Tensor | None, up_EFD: Tensor, down_EDF: Tensor,
    adapters: Adapters = _NO_ADAPTERS, form: Form = _PLAIN,
) -> Tensor:  # fmt: skip
    """Weighted outputs (M, D) of rows that are sorted by expert; the rows of expert e end at ends[e]."""
    gate, up, down = adapters
    gate_MF = None if gate_EFD is None else adapted_mm(rows_MD, gate_EFD, ends_E, gate)
    up_MF = adapted_mm(rows_MD, up_EFD, ends_E, up)
    is_of_ME = None
    if gate_MF is not None and form.gate_EF is not None and form.up_EF is not None:
        # the biases of each row as a product, whose gradients are sums in a fixed order, unlike those of a gather
        is_of_ME = _experts_of(ends_E, rows_MD)
        gate_MF, up_MF = gate_MF + is_of_ME @ form.gate_EF, up_MF + is_of_ME @ form.up_EF
    hidden_MF = form.activation(gate_MF, up_MF)
    # weighting the hidden rows equals weighting the outputs, and they are narrower
    out_MD = adapted_mm(hidden_MF * weights_M[:, None], down_EDF, ends_E, down)
    return out_MD if is_of_ME is None or form.down_ED is None else out_MD + (is_of_ME * weights_M[:, None]) @ form.down_ED


def _experts_of(ends_E: Tensor, rows_MD: Tensor) -> Tensor:
    """1 where a sorted row is of an expert, and 0 elsewhere: (M, E) in the type of the rows."""
    place_M = torch.arange(rows_MD.shape[0], device=ends_E.device)
    before_ME = place_M[:, None] < ends_E
    return (before_ME & ~F.pad(before_ME[:, :-1], (1, 0))).to(rows_MD.dtype)


def run_sorted_plain(
    rows_MD: Tensor, weights_M: Tensor, ends_E: Tensor, gate_EFD: Tensor | None, up_EFD: Tensor, down_EDF: Tensor,
    adapters: Adapters = _NO_ADAPTERS, form: Form = _PLAIN,
) -> Tensor:  # fmt: skip
    """`run_sorted`, one expert at a time."""
    rows = rows_MD.tensor_split(ends_E[:-1].long().cpu())
    weights = _of_experts(gate_EFD, up_EFD, down_EDF)
    return torch.cat([_expert(x, expert, weights[expert], adapters, form) for expert, x in enumerate(rows)]) * weights_M[:, None]


def _of_experts(gate_EFD: Tensor | None, up_EFD: Tensor, down_EDF: Tensor) -> list[Weights]:
    """The matrices of each expert."""
    gates = [None] * up_EFD.shape[0] if gate_EFD is None else gate_EFD.unbind()
    return list(zip(gates, up_EFD.unbind(), down_EDF.unbind(), strict=True))


def _expert(x: Tensor, expert: int, weights: Weights, adapters: Adapters, form: Form) -> Tensor:
    """The output of one expert for its rows."""
    biases = (form.gate_EF, form.up_EF, form.down_ED)

    def project(x: Tensor, weight: Tensor, part: int) -> Tensor:
        out, bias = adapted_linear(x, weight, adapters[part], expert), biases[part]
        return out if bias is None else out + bias[expert]

    gate, up, down = weights
    return project(form.activation(None if gate is None else project(x, gate, 0), project(x, up, 1)), down, 2)


def experts_plain(
    x_ND: Tensor, routing: Routing, gate_EFD: Tensor | None, up_EFD: Tensor, down_EDF: Tensor, adapters: Adapters = _NO_ADAPTERS,
    form: Form = _PLAIN,
) -> Tensor:  # fmt: skip
    """`experts_fast`, one expert at a time: the reference implementation for tests."""
    out_ND = torch.zeros_like(x_ND)
    for expert, weights in enumerate(_of_experts(gate_EFD, up_EFD, down_EDF)):
        token, slot = (routing.experts == expert).nonzero(as_tuple=True)
        of_expert = _expert(x_ND[token], expert, weights, adapters, form)
        weighted = of_expert * routing.weights[token, slot, None].to(x_ND.dtype)
        out_ND = out_ND.index_add(0, token, weighted)
    return out_ND


@operator
def grouped_mm_cpu(x_MD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped_mm` as one operator for the compiler, whose own kernel supports bf16 only (torch 2.13)."""
    if x_MD.dtype == torch.float32:
        return F.grouped_mm(x_MD, weight_EFD.transpose(1, 2), offs=ends_E)
    return _rows_times(x_MD, weight_EFD.transpose(1, 2), ends_E)


@register_fake(grouped_mm_cpu)
def _(x_MD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    return x_MD.new_empty(x_MD.shape[0], weight_EFD.shape[1])


@operator
def grouped_mm_cpu_backward(grad_MF: Tensor, x_MD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    if x_MD.dtype == torch.float32:
        return F.grouped_mm(grad_MF, weight_EFD, offs=ends_E), F.grouped_mm(grad_MF.T, x_MD, offs=ends_E)
    return _rows_times(grad_MF, weight_EFD, ends_E), _rows_outer(grad_MF, x_MD, ends_E)


@register_fake(grouped_mm_cpu_backward)
def _(grad_MF: Tensor, x_MD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_MD), torch.empty_like(weight_EFD)


def _keep(ctx, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad_MF: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
    return (*grouped_mm_cpu_backward(grad_MF.contiguous(), *ctx.saved_tensors), None)


register_autograd(grouped_mm_cpu, _differentiate, setup_context=_keep)


# Torch multiplies bf16 and fp16 on CPUs by oneDNN, which generates code for each shape that it meets: 1 to 3 ms, ten times the product of
# an expert of a small model. An expert's rows are others in each step, so a product takes some of the next expert's rows as well, and few
# shapes recur. What they contribute is written over, or multiplied by zero. Below half of `_ROWS` rows per expert, as in decoding, torch's
# own product is faster: it meets few shapes anyway.
_ROWS = 64


def _spans(ends_E: Tensor, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """For each expert the begin and the end of its rows, and of the span around them that is multiplied: a multiple of `_ROWS`, or all
    rows. `_ROWS` or fewer are a span of their own."""
    begin = 0
    for end in ends_E.tolist():
        length = end - begin
        if length > _ROWS:
            length = min(-(-length // _ROWS) * _ROWS, rows)
        first = min(begin, rows - length)
        yield begin, end, first, first + length
        begin = end


def _rows_times(x_MD: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """The rows of each expert times its weight: (M, F)."""
    out_MF = x_MD.new_empty(x_MD.shape[0], weight_EDF.shape[2])
    for weight_DF, (begin, end, first, last) in zip(weight_EDF, _spans(ends_E, x_MD.shape[0]), strict=True):
        if first == begin:  # what follows its own rows is written over by the next experts
            torch.mm(x_MD[first:last], weight_DF, out=out_MF[first:last])
        else:
            out_MF[begin:end] = torch.mm(x_MD[first:last], weight_DF)[begin - first : end - first]
    return out_MF


def _rows_outer(grad_MF: Tensor, x_MD: Tensor, ends_E: Tensor) -> Tensor:
    """The sum of the outer products of the rows of each expert: (E, F, D)."""
    out_EFD = x_MD.new_empty(ends_E.shape[0], grad_MF.shape[1], x_MD.shape[1])
    for out_FD, (begin, end, first, last) in zip(out_EFD, _spans(ends_E, x_MD.shape[0]), strict=True):
        grad_RF = F.pad(grad_MF[begin:end], (0, 0, begin - first, last - end))  # rows that are not its own are multiplied by zero
        torch.mm(grad_RF.T, x_MD[first:last], out=out_FD)
    return out_EFD


class _Dispatch(torch.autograd.Function):
    """Copy each token to its K rows, sorted by expert. Its transpose is `_Combine`: a gather and a sum, never a scatter-add."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, order_M: Tensor, place_M: Tensor, K: int) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(place_M)
        ctx.K = K
        return x_ND.index_select(0, order_M // K)

    @staticmethod
    def backward(ctx, grad_MD: Tensor):  # type: ignore[no-untyped-def, override]
        (place_M,) = ctx.saved_tensors
        return _sum_rows(grad_MD, place_M, ctx.K), None, None, None


class _Combine(torch.autograd.Function):
    """Sum each token's K rows."""

    @staticmethod
    def forward(ctx, y_MD: Tensor, order_M: Tensor, place_M: Tensor, K: int) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(order_M)
        ctx.K = K
        return _sum_rows(y_MD, place_M, K)

    @staticmethod
    def backward(ctx, grad_ND: Tensor):  # type: ignore[no-untyped-def, override]
        (order_M,) = ctx.saved_tensors
        return grad_ND.index_select(0, order_M // ctx.K), None, None, None


def _sum_rows(rows_MD: Tensor, place_M: Tensor, K: int, weights_NK: Tensor | None = None) -> Tensor:
    """The sum of each group of K rows in `place`, weighted by `weights`: (M / K, D)."""
    if rows_MD.device.type == "cpu" and not torch.compiler.is_compiling():  # one operator, without a copy of the rows
        return F.embedding_bag(place_M.view(-1, K), rows_MD, mode="sum", per_sample_weights=weights_NK)
    rows_NKD = rows_MD.index_select(0, place_M).view(-1, K, rows_MD.shape[-1])
    return (rows_NKD if weights_NK is None else rows_NKD * weights_NK[..., None]).sum(1)
