"""Overrides members of single modules, so that a module that holds distributed tensors computes with its local parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

# As long as a module is of the class: members may know process groups, which should end with their models.
_SUBCLASSES: WeakValueDictionary[tuple[Any, ...], type[nn.Module]] = WeakValueDictionary()


def override_members(module: nn.Module, members: Mapping[str, Any]) -> None:
    """Give one module other members than its class has, by a subclass; names of parameters, hooks and `isinstance` stay.

    Members may be methods, which find the original by the class they came from, and properties. Modules of one class that are given the
    same members get the same subclass, so that the compiler takes layers that are alike for what they are and compiles one.
    """
    cls = type(module)
    key = (cls, *sorted(members.items()))
    if (made := _SUBCLASSES.get(key)) is None:
        made = _SUBCLASSES[key] = type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})
    module.__class__ = made


def use_local_parameters(module: nn.Module, gradients: Mapping[str, Sequence[Placement]] | None = None) -> None:
    """From now on the module's own forward sees its distributed parameters as plain tensors: this rank's parts.

    A part that is a copy (Replicate) gets a partial gradient on each rank, to be summed; `gradients` names what is otherwise, as
    placements on the parameter's mesh: Replicate where all ranks compute the same. What FSDP2 has sharded further is seen as it is,
    outside the forward that gathers it: FSDP2 itself looks there.
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
