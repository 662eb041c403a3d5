"""Muon: momentum, orthogonalised by Newton-Schulz (Jordan 2024, https://kellerjordan.github.io/posts/muon/; Moonlight, arXiv:2502.16982).

Shapes: N matrices of R rows and C columns, R <= C in a stack; a parameter is one matrix (R, C) or E experts (E, R, C).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lmworks.optim.groups import Group
from lmworks.optim.select import selected
from lmworks.precision import has_bf16

QUINTIC = (3.4445, -4.775, 2.0315)
_EPS = 1e-7


def orthogonalize(stack_NRC: Tensor, steps: int = 5) -> Tensor:
    """Bring all singular values of each matrix near 1 (between about 0.7 and 1.2) by the quintic iteration X <- aX + b(XX')X + c(XX')^2 X.

    The stack is overwritten; arithmetic is in its dtype. R <= C keeps the Gram matrix small.
    """
    a, b, c = QUINTIC
    assert stack_NRC.shape[1] <= stack_NRC.shape[2]
    x = stack_NRC.div_(torch.linalg.vector_norm(stack_NRC, dim=(1, 2), keepdim=True).clamp(min=_EPS))
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def orthogonalize_plain(matrix_RC: Tensor, steps: int = 5) -> Tensor:
    """The twin: one matrix of any proportion, fp32, as it is written on paper."""
    a, b, c = QUINTIC
    x = matrix_RC.float()
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(steps):
        x = a * x + b * (x @ x.T @ x) + c * (x @ x.T @ x @ x.T @ x)
    return x


def update_scale(rows: int, cols: int, kind: Literal["rms", "spectral"]) -> float:
    """What an orthogonal update is multiplied by, beside the learning rate.

    rms: an orthogonal R x C matrix has elements of root mean square 1/sqrt(max(R, C)); this brings it to 0.2, about what AdamW's updates
    have, so that both share rates and weight decay (arXiv:2502.16982, section 2.2). spectral: Jordan's, for rates near 0.02.
    """
    return 0.2 * math.sqrt(max(rows, cols)) if kind == "rms" else math.sqrt(max(1.0, rows / cols))


@dataclass(frozen=True)
class _Piece:
    """Some matrices of one parameter: what one stack takes at a time."""

    name: str
    parameter: Tensor
    first: int
    count: int
    learning_rate: float
    weight_decay: float

    def of(self, tensor: Tensor) -> Tensor:
        """This piece (count, R, C) of a tensor shaped as the parameter; a view."""
        return tensor.view(-1, *tensor.shape[-2:])[self.first : self.first + self.count]


def _pieces(groups: Sequence[Group], limit: int) -> Iterator[_Piece]:
    for group in groups:
        for name, parameter in group.parameters.items():
            rows, cols = parameter.shape[-2:]
            matrices, at_once = parameter.numel() // (rows * cols), max(1, limit // (rows * cols))
            for first in range(0, matrices, at_once):
                yield _Piece(name, parameter, first, min(at_once, matrices - first), group.learning_rate, group.weight_decay)


def _stacks(groups: Sequence[Group], limit: int) -> list[list[_Piece]]:
    """Pieces of equal shape, up to transposition, together; at most `limit` elements unless one matrix alone has more."""
    stacks: dict[tuple[int, int], list[list[_Piece]]] = defaultdict(list)
    for piece in _pieces(groups, limit):
        rows, cols = piece.parameter.shape[-2:]
        same = stacks[min(rows, cols), max(rows, cols)]
        if not same or (sum(other.count for other in same[-1]) + piece.count) * rows * cols > limit:
            same.append([])
        same[-1].append(piece)
    return [stack for same in stacks.values() for stack in same]


class Muon:
    """Muon over groups of matrices and expert stacks; equal to `torch.optim.Muon` on each matrix alone.

    `dtype` is that of Newton-Schulz (torch: bf16); left out, bf16 where the device multiplies it in hardware, else fp32. The state,
    `momentum[name]`, is fp32 and shaped as its parameter.
    `stack_elements` bounds a stack, and with it the scratch memory of about 12 bytes per element. Left out, it is 1Mi on CPU, where a
    stack should stay in the cache and fresh large buffers cost page faults, and 128Mi elsewhere, where few large kernels are best.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        scale: Literal["rms", "spectral"] = "rms",
        dtype: torch.dtype | None = None,
        stack_elements: int | None = None,
    ) -> None:
        self.beta, self.nesterov, self.steps, self.scale = momentum, nesterov, steps, scale
        self.momentum = {name: torch.zeros_like(p, dtype=torch.float32) for group in groups for name, p in group.parameters.items()}
        devices = {p.device for group in groups for p in group.parameters.values()}
        on_cpu = all(device.type == "cpu" for device in devices)
        self.dtype = dtype or (torch.bfloat16 if all(map(has_bf16, devices)) else torch.float32)
        self._stacks = _stacks(groups, stack_elements or (1 << 20 if on_cpu else 1 << 27))

    @torch.no_grad()
    def step(self, factor: float = 1.0, finite: Tensor | None = None) -> None:
        """One update at `factor` times the groups' rates; parameters without a gradient are left alone."""
        for stack in self._stacks:
            pieces = [piece for piece in stack if piece.parameter.grad is not None]
            if pieces:
                self._step(pieces, factor, finite)

    def _step(self, pieces: list[_Piece], factor: float, finite: Tensor | None) -> None:
        weights = [piece.of(piece.parameter) for piece in pieces]
        momenta = [piece.of(self.momentum[piece.name]) for piece in pieces]
        grads = [piece.of(piece.parameter.grad).float() for piece in pieces if piece.parameter.grad is not None]
        with selected([*weights, *momenta], finite):
            torch._foreach_lerp_(momenta, grads, 1 - self.beta)
            directions = torch._foreach_lerp(grads, momenta, self.beta) if self.nesterov else momenta
            torch._foreach_mul_(weights, [1 - factor * piece.learning_rate * piece.weight_decay for piece in pieces])
            for piece, weight, update in zip(pieces, weights, self._orthogonal(directions), strict=True):
                rate = factor * piece.learning_rate * update_scale(weight.shape[1], weight.shape[2], self.scale)
                weight.add_(update, alpha=-rate)

    def _orthogonal(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalise pieces (n, R, C) or (n, C, R) in one stack; views of it, each the way its piece lay."""
        rows, cols = sorted(directions[0].shape[1:])
        counts = [len(piece) for piece in directions]
        stack = torch.empty((sum(counts), rows, cols), dtype=self.dtype, device=directions[0].device)
        for place, piece in zip(stack.split(counts), directions, strict=True):
            place.copy_(piece.mT if piece.shape[1] > piece.shape[2] else piece)
        done = orthogonalize(stack, self.steps).split(counts)
        return [out.mT if piece.shape[1] > piece.shape[2] else out for out, piece in zip(done, directions, strict=True)]
