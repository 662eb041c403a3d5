"""Basic layers: linear layers that compute in the dtype of the activations, RMS norm, feed-forward blocks, and low-rank adapters.

An adapter is that of one matrix, or of a stack of them (LoRA, Hu et al. 2021, arXiv:2106.09685).
Shapes: r rank, I inputs, O outputs; M rows sorted by expert, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmworks.host.devices import at_least_fp32


class Adapter(nn.Module):
    """scale B A x, with A (r, I) and B (O, r), or (E, r, I) and (E, O, r) for the matrices of E experts.

    B is 0 at the start, so that the model begins as the base model. Weights are fp32, cast to the type of x, as those of `Linear`.
    """

    def __init__(self, weight: Tensor, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        *stack, outputs, inputs = weight.shape
        self.A = nn.Parameter(torch.empty(*stack, rank, inputs))
        self.B = nn.Parameter(torch.empty(*stack, outputs, rank))
        self.rank, self.scale, self.dropout = rank, scale, dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(self.dropped(x), self.A.to(x.dtype)), self.B.to(x.dtype)) * self.scale

    def dropped(self, x: Tensor) -> Tensor:
        """The input after dropout."""
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def delta(self) -> Tensor:
        """scale B A, what the adapter adds to its matrices, in fp32."""
        return self.B @ self.A * self.scale


class Linear(nn.Module):
    """y = x W^T + b with the weight (out, in) kept in fp32 and cast to x's type, so that gradients accumulate in fp32.

    With a low-rank adapter (`lmworks.model.lora`) its output is added.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.lora: Adapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return y if self.lora is None else y + self.lora(x)

    def matrix(self) -> Tensor:
        """The weight, with its adapter."""
        return self.weight if self.lora is None else self.weight + self.lora.delta()


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019), computed in fp32, weighted in x's type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.size = size
        self.eps = eps
        self.plain = False

    def forward(self, x: Tensor) -> Tensor:
        few = x.numel() <= _FEW and not torch.is_grad_enabled()  # as in decoding: less to compute than to call
        few = few or x.dtype == torch.float64 or self.weight.ndim > 1  # for which the cached norm is too narrow, or has one weight only
        if x.device.type == "cpu" and not self.plain and not few and not torch.compiler.is_compiling():
            out: Tensor = _CachedNorm.apply(x, self.weight, self.eps)
            return out
        if not torch.is_grad_enabled() and not self.plain and not torch.compiler.is_compiling():  # one operator, and the same bits
            return F.rms_norm(x, x.shape[-1:], None, self.eps).mul_(self.weight.to(x.dtype))
        wide = at_least_fp32(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)

    def apply_(self, x: Tensor) -> None:
        """The norm in place."""
        x.copy_(self(x))


_FEW = 1 << 16  # elements


class _CachedNorm(torch.autograd.Function):
    """RMS norm for eager mode on CPUs: processes some rows at a time, in place, so that intermediate results stay in the CPU cache.

    Forward and backward take 0.4 of the time of separate operators, as with compiled code.
    """

    @staticmethod
    def forward(ctx, x, weight_D, eps):  # type: ignore[no-untyped-def, override]
        x_ND = x.reshape(-1, x.shape[-1])
        out_ND, scale_N1 = torch.empty_like(x_ND), torch.empty(x_ND.shape[0], 1, dtype=torch.float32)
        weight = weight_D.to(x.dtype)
        for rows in _pieces(x_ND):
            wide = x_ND[rows].to(torch.float32, copy=True)
            scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            scale_N1[rows] = scale
            out_ND[rows].copy_(wide.mul_(scale)).mul_(weight)
        ctx.save_for_backward(x_ND, weight_D, scale_N1)
        return out_ND.view(x.shape)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def, override]
        x_ND, weight_D, scale_N1 = ctx.saved_tensors
        grad_ND = grad.reshape(x_ND.shape)
        grad_x, grad_weight = torch.empty_like(x_ND), torch.zeros(weight_D.shape, dtype=torch.float32)
        weight = weight_D.to(x_ND.dtype).float()
        for rows in _pieces(x_ND):
            scale, normed = scale_N1[rows], x_ND[rows].to(torch.float32, copy=True)
            normed.mul_(scale)
            wide = grad_ND[rows].to(torch.float32, copy=True)
            product = wide * normed
            grad_weight += product.sum(0)
            along_N1 = (product @ weight[:, None]).div_(-weight.numel())  # the component of the gradient along the row
            grad_x[rows] = wide.mul_(weight).addcmul_(normed, along_N1).mul_(scale)
        return grad_x.view(grad.shape), grad_weight.to(weight_D.dtype), None


def _pieces(x_ND: Tensor) -> Iterator[slice]:
    size = max(1, _CACHED // x_ND.shape[1])
    return (slice(start, start + size) for start in range(0, x_ND.shape[0], size))


_CACHED = 1 << 19  # elements of a piece, for each of which three fp32 numbers are in the cache


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
"""The functions of the gate under `model.hidden_act`; relu2 has no gate (`MLP`)."""


def relu2(x: Tensor) -> Tensor:
    """The square of ReLU (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


def times(x: Tensor, factor: float) -> Tensor:
    """x times a constant of the model, which is 1 in most models and then costs nothing."""
    return x if factor == 1 else x * factor


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)). The gradient of torch's own has other strides in eager mode than the compiler expects of it."""
    return torch.logaddexp(x, x.new_zeros(()))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), or with another activation of the gate, as GEGLU (Shazeer 2020, arXiv:2002.05202), and with a constant
    factor on the gate, which is 1 in most models."""

    def __init__(self, size: int, hidden: int, activation: str = "silu", gate_factor: float = 1.0) -> None:
        super().__init__()
        self.activation, self.gate_factor = ACTIVATIONS[activation], gate_factor
        self.gate = Linear(size, hidden)
        self.up = Linear(size, hidden)
        self.down = Linear(hidden, size)
        self.joined: Linear | None = None  # gate and up as one matrix (`lmworks.inference.model`)

    def forward(self, x: Tensor) -> Tensor:
        if self.joined is not None:
            gate, up = self.joined(x).chunk(2, dim=-1)
            return self.down(self.activation(times(gate, self.gate_factor)).mul_(up))
        return self.down(self.activation(times(self.gate(x), self.gate_factor)) * self.up(x))


class MLP(nn.Module):
    """down(relu(up(x))^2): a feed-forward block without a gate (Nemotron-H, arXiv:2504.03624)."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(size, hidden)
        self.down = Linear(hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(relu2(self.up(x)))


def feed_forward(size: int, hidden: int, activation: str, gate_factor: float = 1.0) -> SwiGLU | MLP:
    """The dense feed-forward block for `model.hidden_act`."""
    return MLP(size, hidden) if activation == "relu2" else SwiGLU(size, hidden, activation, gate_factor)
