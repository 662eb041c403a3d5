"""What lets a module compute with this rank's parts of its parameters, though it holds distributed tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate


def derive(module: nn.Module, members: Mapping[str, Any]) -> None:
    """Give one module other members than its class has, as a subclass of its own; names of parameters, hooks and `isinstance` stay.

    Members may be methods, which find the original under `super(type(self), self)` or by the class they came from, and properties.
    """
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})


def see_parts(module: nn.Module, gradients: Mapping[str, Sequence[Placement]] | None = None) -> None:
    """From now on the module's own forward sees its distributed parameters as plain tensors: this rank's parts.

    A part that is a copy (Replicate) gets a partial gradient on each rank, to be summed; `gradients` names what is otherwise, as
    placements on the parameter's mesh: Replicate where all ranks compute the same.
    """
    own = gradients or {}
    members = {name: property(_part(name, own.get(name))) for name, parameter in module._parameters.items() if parameter is not None}
    derive(module, members)


def _part(name: str, gradient: Sequence[Placement] | None) -> Any:
    def part(module: nn.Module) -> Any:
        parameter = module._parameters[name]
        if not isinstance(parameter, DTensor):
            return parameter
        placements = gradient or [Partial() if isinstance(p, Replicate) else p for p in parameter.placements]
        return parameter.to_local(grad_placements=placements)

    return part
