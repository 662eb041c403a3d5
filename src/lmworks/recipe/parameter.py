"""One trained tensor of a model, by name and shape."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

from lmworks.recipe.schema.model import is_convolution
from lmworks.recipe.schema.train import WeightKind

Component = Literal[
    "embedding", "attention", "dense ffn", "experts", "shared experts", "router", "norms", "head", "mtp projection", "latent projections",
]  # fmt: skip

KINDS: tuple[WeightKind, ...] = get_args(WeightKind)
"""What weights are: for statistics, and for `optimizer.lr_scales`."""


def kind_of(name: str, dimensions: int) -> WeightKind:
    """What a parameter is, by its name and number of dimensions."""
    if name == "embedding.weight":
        return "embedding"
    if name == "head.weight":
        return "head"
    if dimensions < 2 or name.endswith("bias") or is_convolution(name):
        return "vectors"
    return "router" if ".router." in name else "matrices" if dimensions == 2 else "experts"


@dataclass(frozen=True)
class Parameter:
    """One trained tensor. `layer` is None outside the layers, and goes on counting through those of multi-token prediction, which `mtp`
    marks; `active` is the share of it that one token uses.
    """

    name: str
    shape: tuple[int, ...]
    component: Component
    layer: int | None = None
    active: float = 1.0
    mtp: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is a hidden matrix or a stack of them: what Muon trains. A depthwise convolution has one filter per channel and mixes
        no channels, and the biases of experts are a stack of vectors, so they are none."""
        if is_convolution(self.name) or self.name.endswith("bias"):
            return False
        return len(self.shape) > 1 and self.component not in ("embedding", "head")
