"""Layers for a few rows at a time on CPUs, without gradients.

Linear layers whose weights oneDNN has arranged for its products on x86 CPUs, as `torch.compile` does when it freezes weights: a product of
a few rows with a plain weight arranges it anew each time, which takes longer than to multiply by it. And norms of few operators: between
two products, each of which replaces what the core has cached, to call an operator takes longer than it computes.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor, nn

from lmworks.model.layers import Linear, RMSNorm

_FEW = 4
_ROWS = 16  # of a decode step, for which weights are arranged; other numbers of rows give the same results


class PackedLinear(nn.Module):
    """`Linear` without gradients and adapters."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), _ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


class FewNorm(nn.Module):
    """`RMSNorm` in four operators, where torch has six to nine: x / sqrt(|x|^2 + D eps) times the weight times sqrt(D)."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.size = norm.size
        self._weight = norm.weight.detach() * norm.size**0.5
        self._floor = norm.weight.new_full((), (norm.size * norm.eps) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x / self._length(x)).mul_(self._weight)

    def apply_(self, x: Tensor) -> None:
        """The norm in place."""
        x.div_(self._length(x)).mul_(self._weight)

    def _length(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)


def pays(dtype: torch.dtype, device: torch.device, rows: int) -> bool:
    """Whether arranged weights of this type make products of so many rows faster on this device: those of fp32 do from a few rows on (fewer
    read each weight once in any case, and the plain product does it better), and those of bf16 always (LOG.md)."""
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    return (dtype == torch.float32 and rows >= _FEW) or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
