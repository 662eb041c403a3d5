"""Low-rank adapters."""

from __future__ import annotations

from pydantic import Field

from lmworks.recipe.schema.base import Node


class Lora(Node):
    """Trains low-rank adapters instead of the weights (LoRA, arXiv:2106.09685): y = W x + scale B A x with W frozen."""

    rank: int = Field(16, gt=0, description="rank of the adapters: rows of A and columns of B")
    alpha: float = Field(32.0, gt=0, description="scale times the rank")
    rslora: bool = Field(False, description="scale is alpha / sqrt(rank) (arXiv:2312.03732) instead of alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of the adapters")
    targets: tuple[str, ...] = Field(
        ("all-linear",), min_length=1,
        description="which matrices have adapters: attention, mlp (dense and shared experts), experts (routed ones), all-linear (attention "
        "and mlp), or ends of names of modules, such as query or layers.3.ffn.down",
    )  # fmt: skip
    init_from: str | None = Field(
        None, description="a PEFT adapter of this base model to continue from: a directory with adapter_config.json and "
        "adapter_model.safetensors"
    )  # fmt: skip

    @property
    def scale(self) -> float:
        """The factor of B A x."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


GROUPS = ("attention", "mlp", "experts", "all-linear")
"""The targets that stand for several matrices."""


def target_matches(target: str, name: str, groups: tuple[str, ...]) -> bool:
    """Whether a target means the matrix `name`, which belongs to these of `GROUPS`.

    Ends of names mean whole parts, and not the experts unless they are named, whose projections have the names of others.
    """
    if target in GROUPS:
        return target in groups
    return f".{name}".endswith(f".{target}") and ("experts" not in groups or "experts" in target)


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter, by its name."""
    return name.endswith(("lora.A", "lora.B"))


def matrix_of(name: str) -> str:
    """The name of the matrix that a parameter of an adapter belongs to."""
    place = name[: -len("lora.A")]
    return place.removesuffix("_") if place.endswith("_") else f"{place}weight"
