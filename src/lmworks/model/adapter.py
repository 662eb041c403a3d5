"""A low-rank adapter of one matrix, or of a stack of them (LoRA, Hu et al. 2021, arXiv:2106.09685).

Shapes: r rank, I inputs, O outputs; M rows sorted by expert, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
