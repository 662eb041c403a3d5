"""Products of fp8 numbers with a scale per row, and a linear layer of them with its backward pass.

All three products of the layer have e4m3 numbers on both sides, as in the rowwise recipe of torchao.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_KIND = torch.float8_e4m3fn
_SMALLEST = 1e-12  # of a row's largest number: a row of zeros has a scale


def fp8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in e4m3, and their scales (M, 1)."""
    scale_M1 = x_MK.abs().amax(-1, keepdim=True).float().clamp_min(_SMALLEST) / torch.finfo(_KIND).max
    return (x_MK.float() / scale_M1).to(_KIND), scale_M1


def scaled_product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """left (M, K) times the transposed right (N, K), in bf16."""
    (left_MK, left_scale_M1), (right_NK, right_scale_N1) = left, right
    return torch._scaled_mm(left_MK, right_NK.T, scale_a=left_scale_M1, scale_b=right_scale_N1.T, out_dtype=torch.bfloat16)


class Fp8Linear(torch.autograd.Function):
    """x (M, K) times the transposed weight (N, K), and both gradients. Each operand has scales along what is summed."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x_MK, weight_NK)
        return scaled_product(fp8(x_MK), fp8(weight_NK))

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x_MK, weight_NK = ctx.saved_tensors
        grad_MN = grad_MN.contiguous()
        grad_x = scaled_product(fp8(grad_MN), fp8(weight_NK.T.contiguous()))
        return grad_x, scaled_product(fp8(grad_MN.T.contiguous()), fp8(x_MK.T.contiguous()))
