"""What autograd keeps of a forward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def saved_bytes(run: Callable[[], object], without: nn.Module | None = None) -> int:
    """Bytes that `run` saves for the backward pass, each storage once; not those of the parameters of `without`."""
    parameters = () if without is None else without.parameters()
    weights, held = {parameter.untyped_storage().data_ptr() for parameter in parameters}, dict[int, torch.Tensor]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            held[place] = tensor  # so that no later storage has its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())
