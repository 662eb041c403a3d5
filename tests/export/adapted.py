"""A model with low-rank adapters, and the same model with them merged."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from lmworks.model import Transformer
from lmworks.model.lora import attach, merge
from lmworks.recipe.schema.model import Lora, is_adapter


@dataclass(frozen=True)
class Adapted:
    """Adapters by their names, their options, and the model that has them merged."""

    adapters: dict[str, Tensor]
    lora: Lora
    merged: Transformer


def adapted(model: Transformer, *targets: str) -> Adapted:
    """Adapters of large random values for a copy of the model."""
    lora, model = Lora(rank=4, alpha=8.0, rslora=True, targets=targets), copy.deepcopy(model)
    attach(model, lora)
    found = {name: tensor for name, tensor in model.state_dict().items() if is_adapter(name)}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for tensor in found.values():
            tensor.normal_(0.0, 0.05)
    found = {name: tensor.clone() for name, tensor in found.items()}
    return Adapted(found, lora, merge(model))
