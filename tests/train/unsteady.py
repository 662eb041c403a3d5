"""Gradients as of kernels of GPUs that add up in another order each time."""

from __future__ import annotations

from typing import Any

import torch


class AnotherOrder(torch.autograd.Function):
    """Identity of `x`; its gradient is rounded in another way each time, by a relative `size`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: float) -> torch.Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        draw = torch.Generator()
        draw.seed()
        return grad * (1 + ctx.size * torch.randn(grad.shape, generator=draw)), None
