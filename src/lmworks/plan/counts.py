"""Exact parameter counts from the config alone; they equal those of the built model."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from lmworks.recipe.derivation.parameters import Component, Parameter, parameters
from lmworks.recipe.schema.lora import Lora, target_matches
from lmworks.recipe.schema.model import Model

_TARGETS: dict[Component, tuple[str, ...]] = {
    "attention": ("attention", "all-linear"), "dense ffn": ("mlp", "all-linear"), "shared experts": ("mlp", "all-linear"),
    "experts": ("experts",),
}  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """Parameters of a model. `active` is the number that one token uses, with the whole embedding.

    `mtp` and `mtp_active` are those of multi-token prediction, which exists only in training; no other count here includes them.
    """

    total: int
    active: int
    embedding: int
    tied: bool
    components: dict[str, int]
    active_components: dict[str, int]
    mtp: int = 0
    mtp_active: int = 0

    @property
    def trained(self) -> int:
        """All parameters in training."""
        return self.total + self.mtp

    @property
    def active_computed(self) -> int:
        """Active parameters in matrix multiplications: without the embedding look-up, but with the head, even if it is tied."""
        return self.active if self.tied else self.active - self.embedding


def count_by_component(model: Model) -> Counts:
    """Count a resolved model, total and active, by component."""
    components: dict[str, int] = {}
    active: dict[str, float] = {}
    mtp, mtp_active = 0, 0.0
    for parameter in parameters(model):
        if parameter.mtp:
            mtp += parameter.size
            mtp_active += parameter.size * parameter.active
            continue
        components[parameter.component] = components.get(parameter.component, 0) + parameter.size
        active[parameter.component] = active.get(parameter.component, 0) + parameter.size * parameter.active
    rounded = {name: round(value) for name, value in active.items()}
    return Counts(
        sum(components.values()), sum(rounded.values()), components["embedding"], model.tie_word_embeddings, components, rounded,
        mtp, round(mtp_active),
    )  # fmt: skip


def adapter_size(parameter: Parameter, lora: Lora) -> int:
    """Parameters of the low-rank adapter of one tensor, or of a stack of them; 0 if it has none."""
    groups, name = _TARGETS.get(parameter.component, ()), parameter.name.removesuffix(".weight")
    if not groups or not parameter.is_matrix or parameter.mtp:
        return 0
    if not any(target_matches(target, name, groups) for target in lora.targets):
        return 0
    *stack, rows, columns = parameter.shape
    return prod(stack) * lora.rank * (rows + columns)


def count_adapters(model: Model, lora: Lora) -> int:
    """Parameters of all low-rank adapters."""
    return sum(adapter_size(parameter, lora) for parameter in parameters(model))
