"""Overrides members of single modules, so that a module that holds distributed tensors computes with its local parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

# Weak values: members may hold process groups, which should be freed with their models.
_SUBCLASSES: WeakValueDictionary[tuple[Any, ...], type[nn.Module]] = WeakValueDictionary()


def override_members(module: nn.Module, members: Mapping[str, Any]) -> None:
    """Override members of one module by giving it a subclass; parameter names, hooks and `isinstance` are unaffected.

    Members may be properties, or methods, which call the original through the original class. Modules of one class with the same members
    get the same subclass, so that the compiler compiles equal layers only once.
    """
    cls = type(module)
    key = (cls, *sorted(members.items()))
    if (made := _SUBCLASSES.get(key)) is None:
        made = _SUBCLASSES[key] = type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})
    module.__class__ = made


def use_local_parameters(module: nn.Module, gradients: Mapping[str, Sequence[Placement]] | None = None) -> None:
    """Make the module's own forward pass see its distributed parameters as plain tensors: this rank's parts.

    A replicated parameter has a partial gradient on each rank, to be summed; `gradients` states exceptions as placements on the
    parameter's mesh: Replicate if all ranks compute the same. A parameter that FSDP2 has sharded further is returned unchanged outside the
    forward pass that gathers it, because FSDP2 itself accesses it there.
    """
    seen: dict[str, property] = {}
    for name, parameter in module._parameters.items():
        if isinstance(parameter, DTensor):
            usual = [Partial() if isinstance(p, Replicate) else p for p in parameter.placements]
            seen[name] = _part(name, tuple((gradients or {}).get(name, usual)))
    override_members(module, seen)


@lru_cache(maxsize=1024)
def _part(name: str, gradient: tuple[Placement, ...]) -> property:
    def part(module: nn.Module) -> Any:
        parameter = module._parameters[name]
        assert isinstance(parameter, DTensor)
        sharded_further = len(parameter.placements) > len(gradient)
        return parameter if sharded_further else parameter.to_local(grad_placements=gradient)

    return property(part)
