"""Differentiable collectives that the compiler can trace.

Each docstring states the forward operation and, after the arrow, the operation on the gradient, which is its transpose over all ranks.
A group of None means one rank, for which every function is the identity.

`override_members` overrides members of single modules, so that a module that holds distributed tensors computes with its local parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

Group = dist.ProcessGroup | None


def all_sum(x: Tensor, group: Group) -> Tensor:
    """All-reduce -> identity: all ranks continue with the same computation."""
    return x if group is None else _AllSum.apply(x, group.group_name)


def identity_allreduce_grad(x: Tensor, group: Group) -> Tensor:
    """Identity -> all-reduce: `x` is equal on all ranks, and each rank computes a different part from it."""
    return x if group is None else _Copy.apply(x, group.group_name)


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """All-gather along `dim` -> reduce-scatter: each rank computes a different part from the gathered tensor."""
    return x if group is None else _Gather.apply(x, dim, group.group_name, group.size())


def gather_alike(x: Tensor, dim: int, group: Group) -> Tensor:
    """All-gather along `dim` -> own part: all ranks continue with the same computation on the gathered tensor."""
    return x if group is None else _GatherAlike.apply(x, dim, group.group_name, group.rank(), group.size())


def scatter_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    """Reduce-scatter along `dim` -> all-gather."""
    return x if group is None else _ScatterSum.apply(x, dim, group.group_name, group.size())


def split(x: Tensor, dim: int, group: Group) -> Tensor:
    """Own part along `dim` of a tensor that is equal on all ranks -> all-gather."""
    return x if group is None else _Split.apply(x, dim, group.group_name, group.rank(), group.size())


def scale_grad_by_group(x: Tensor, group: Group) -> Tensor:
    """Identity -> divide by the number of ranks: all ranks compute the same from `x`, whose gradients are summed later (`gather`)."""
    return x if group is None else _Alike.apply(x, group.size())


def all_max(x: Tensor, group: Group) -> Tensor:
    """All-reduce with max, without a gradient."""
    return x if group is None else _wait(functional.all_reduce(x.detach().contiguous(), "max", group.group_name))


def exchange(rows: Tensor, received: list[int], sent: list[int], group: Group) -> Tensor:
    """All-to-all of rows: the first `sent[0]` rows go to rank 0, and so on; the first `received[0]` come from rank 0 -> the reverse."""
    return rows if group is None else _Exchange.apply(rows, received, sent, group.group_name)


def _sum(x: Tensor, name: Any) -> Tensor:
    return _wait(functional.all_reduce(x.contiguous(), "sum", name))


# Both collectives work along dimension 0: what torch does for others breaks the graph under the compiler of torch 2.11.
def _concatenate(x: Tensor, dim: int, name: Any, size: int) -> Tensor:
    parts = _wait(functional.all_gather_tensor(x.contiguous(), 0, name)).unflatten(0, (size, x.shape[0]))
    dim %= x.ndim
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _sum_and_scatter(x: Tensor, dim: int, name: Any, size: int) -> Tensor:
    parts = x.unflatten(dim % x.ndim, (size, -1)).movedim(dim % x.ndim, 0)
    return _wait(functional.reduce_scatter_tensor(parts.flatten(0, 1).contiguous(), "sum", 0, name))


def _wait(x: Tensor) -> Tensor:
    return functional.wait_tensor(x)


def _own(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    assert x.shape[dim] % size == 0, "the parts of all ranks have the same size"
    return x.chunk(size, dim)[rank].contiguous()


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: Any) -> Tensor:
        return _sum(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: Any) -> Tensor:
        ctx.name = name
        return x.clone()  # not a view: FSDP2 warns about views that a module returns

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum(grad, ctx.name), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, name: Any, size: int) -> Tensor:
        ctx.dim, ctx.name, ctx.size = dim, name, size
        return _concatenate(x, dim, name, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum_and_scatter(grad, ctx.dim, ctx.name, ctx.size), None, None, None


class _GatherAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, name: str, rank: int, size: int) -> Tensor:
        ctx.dim, ctx.rank, ctx.size = dim, rank, size
        return _concatenate(x, dim, name, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _own(grad, ctx.dim, ctx.rank, ctx.size), None, None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, name: Any, size: int) -> Tensor:
        ctx.dim, ctx.name, ctx.size = dim, name, size
        return _sum_and_scatter(x, dim, name, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _concatenate(grad, ctx.dim, ctx.name, ctx.size), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, name: str, rank: int, size: int) -> Tensor:
        ctx.dim, ctx.name, ctx.size = dim, name, size
        return _own(x, dim, rank, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _concatenate(grad, ctx.dim, ctx.name, ctx.size), None, None, None, None


class _Alike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.size, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], name: Any) -> Tensor:
        ctx.received, ctx.sent, ctx.name = received, sent, name
        return _wait(functional.all_to_all_single(rows.contiguous(), received, sent, name))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _wait(functional.all_to_all_single(grad.contiguous(), ctx.sent, ctx.received, ctx.name)), None, None, None


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
