"""Attaches low-rank adapters to a model, and merges them into its weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lmworks.errors import UserError
from lmworks.model.attention import Attention
from lmworks.model.layers import MLP, Adapter, Linear, SwiGLU
from lmworks.model.mla import LatentAttention
from lmworks.model.moe import Experts
from lmworks.model.transformer import Transformer
from lmworks.recipe.schema.model import LORA_GROUPS, Lora, target_matches

_STACKS = ("gate", "up", "down")
_Place = tuple[str, nn.Module, str, tuple[str, ...]]
"""A matrix that can have an adapter: name, module, attribute, and the groups that it belongs to."""


def attach(model: Transformer, options: Lora) -> list[str]:
    """Freeze the model and add an adapter to each matrix that `options.targets` names; returns the names of the matrices.

    Do it before the model is sharded, on the device (such as meta) that the adapters are to be on; their values are set by
    `lmworks.model.init.initialize`. The embedding, the head, the router and multi-token prediction have none. Raises `UserError` if a
    target matches nothing, or if the rank is larger than a matrix that it names or than all of a group.
    """
    model.requires_grad_(False)
    places = list(_places(model))
    _refuse_targets(places, options)
    chosen = []
    for name, module, attribute, kinds in places:
        if any(target_matches(target, name, kinds) for target in options.targets):
            adapter = Adapter(_matrix(module, attribute), options.rank, options.scale, options.dropout)
            setattr(module, attribute if attribute == "lora" else f"{attribute}_lora", adapter)
            chosen.append(name)
    return chosen


def _refuse_targets(places: list[_Place], options: Lora) -> None:
    """Raise `UserError` for a target that matches nothing, or whose matrices are smaller than the rank. A group may have some smaller ones,
    such as the projection to two numbers for each head: their adapters have the rank all the same, as in PEFT, and cost little."""
    for target in options.targets:
        found = [(name, _matrix(module, attribute)) for name, module, attribute, kinds in places if target_matches(target, name, kinds)]
        if not found:
            groups = [group for group in LORA_GROUPS if any(group in kinds for *_, kinds in places)]
            known = sorted({name.split(".", 2)[-1] for name, *_ in places})
            raise UserError(f"lora.targets: {target!r} matches no matrix of this model; known are {', '.join((*groups, *known))}")
        ranks = [min(weight.shape[-2:]) for _, weight in found]
        most = (max if target in LORA_GROUPS else min)(ranks)
        if options.rank > most:
            name, weight = found[ranks.index(most)]
            shape = " x ".join(map(str, weight.shape[-2:]))
            raise UserError(f"lora.rank {options.rank} is larger than the matrix {name} ({shape}); use at most {most}")


def _matrix(module: nn.Module, attribute: str) -> torch.Tensor:
    """The matrix that an adapter in this attribute of a module belongs to."""
    found: torch.Tensor = getattr(module, attribute if attribute != "lora" else "weight")
    return found


def adapters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Adapter]]:
    """The name of each matrix with an adapter, the module and attribute that hold the matrix, and the adapter."""
    for name, module in model.named_modules():
        for attribute, found in list(module._modules.items()):
            if isinstance(found, Adapter):
                stacked = attribute.removesuffix("_lora") if attribute != "lora" else ""
                yield (f"{name}.{stacked}" if stacked else name), module, stacked or "weight", found


@torch.no_grad()
def merge(model: Transformer) -> Transformer:
    """Add each adapter to its matrix and remove it: the model computes the same as before, up to rounding, and has no adapters."""
    for _, module, attribute, adapter in list(adapters(model)):
        weight = getattr(module, attribute)
        weight += adapter.delta().to(weight.dtype)
        setattr(module, "lora" if attribute == "weight" else f"{attribute}_lora", None)
    return model.requires_grad_(True)


def _places(model: Transformer) -> Iterator[_Place]:
    """Each matrix that can have an adapter."""
    for number, block in model.layers.named_children():
        for name, module in block.named_modules(prefix=f"layers.{number}"):
            dense = isinstance(module, SwiGLU | MLP)
            if dense or isinstance(module, Attention | LatentAttention) or getattr(module, "recurrent", False):
                group = "mlp" if dense else "attention"
                for own, part in module.named_children():
                    if isinstance(part, Linear):
                        yield f"{name}.{own}", part, "lora", (group, "all-linear")
            elif isinstance(module, Experts):
                for stack in (one for one in _STACKS if getattr(module, one) is not None):
                    yield f"{name}.{stack}", module, stack, ("experts",)
