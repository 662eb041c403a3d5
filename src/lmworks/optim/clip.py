"""The global gradient norm, and clipping by it (Pascanu et al. 2013, arXiv:1211.5063), without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm over all elements of all tensors; 0-d fp32, not finite if any element is not.

    On CPU row by row: torch adds a whole tensor up in running fp32 sums, which is off by 1e-3 at 20M elements.
    """
    if not tensors:
        return torch.zeros(())
    if tensors[0].device.type == "cpu":
        norms = [torch.linalg.vector_norm(torch.linalg.vector_norm(tensor.float(), dim=-1)) for tensor in tensors]
    else:
        norms = list(torch._foreach_norm(list(tensors), 2, torch.float32))
    return torch.linalg.vector_norm(torch.stack(norms))


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale the gradients in place so that their global norm is at most `limit` (0: leave them); returns the norm before.

    Non-finite gradients stay so; `Optimizer.step` is told by `finite` to ignore them.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = global_norm(grads)
    # On CPU the norm is known, and a pass over all gradients that multiplies by one can be spared.
    if limit and grads and not (norm.device.type == "cpu" and norm.item() <= limit):
        torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm
