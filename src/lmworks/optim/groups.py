"""Assigns parameters to optimizers and groups by name, so that the result does not depend on the sharding.

The placement of sharded tensors: the local part, and the slice that each rank holds; and how such tensors are updated.

`conditional_update` holds promise 5: a bad value never reaches a weight, because the old one is selected, not because the new one is
multiplied by zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lmworks.errors import UserError
from lmworks.recipe.parameter import kind_of
from lmworks.recipe.schema.model import is_adapter, is_convolution
from lmworks.recipe.schema.train import Optimizer as Options

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MTP = re.compile(r"(?:^|\.)mtp\.\d+\.")


@dataclass
class Group:
    """Parameters with the same optimizer and hyperparameters. `learning_rate` is the peak; the schedule's factor multiplies it. `scale` is
    the factor of `optimizer.lr_scales` in it."""

    kind: Literal["muon", "adamw"]
    learning_rate: float
    weight_decay: float
    scale: float
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def largest_rates(groups: Sequence[Group]) -> dict[str, float]:
    """The largest rate of each kind among the parameters of this rank; without `optimizer.lr_scales`."""
    rates: dict[str, float] = {}
    for group in groups:
        rates[group.kind] = max(rates.get(group.kind, 0.0), group.learning_rate / group.scale)
    return rates


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a hidden matrix: a 2-D weight or a stack of experts inside the layers, including multi-token prediction.

    The router is one: GLM-4.5 (arXiv:2508.06471) uses AdamW only for word embeddings, biases and norms, and Moonlight (arXiv:2502.16982)
    for all that is not a matrix, the embedding and the head, so both train the router with Muon. Embedding and head use AdamW: their rows
    belong to tokens of very different frequency, and they do not map hidden states to hidden states.
    A depthwise convolution is none: it has one filter per channel. Nor are the biases of experts, a stack of vectors.
    Adapters use AdamW: an orthogonalized update of A and B is no orthogonal update of B A, and the published learning rates are for AdamW.
    """
    if parameter.ndim < 2 or name.endswith("bias") or is_adapter(name) or is_convolution(name):
        return False
    return _LAYER.search(name) is not None or _MTP.search(name) is not None


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, adapters and the head; never to norms, biases and embeddings (a tied head is one)."""
    return is_matrix(name, parameter) or name == "head.weight" or is_adapter(name)


def group_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]], options: Options, layers: int | None = None
) -> list[Group]:  # fmt: skip
    """Group the parameters that require gradients, in the order of their names' first appearance.

    With `layer_lr_decay` d and n layers, the rate of layer i is multiplied by d**(n-1-i), that of the embedding by d**n, and that
    of the final norm, the head and multi-token prediction by 1. `layers` is n, needed for a pipeline stage; by default the largest i + 1.
    `lr_scales` multiply them besides.
    """
    named = list(named_parameters)
    if layers is None:
        layers = 1 + max((layer for name, _ in named if (layer := _layer(name)) is not None), default=-1)
    # With `rms` scaling the updates of both optimizers have the same size, so they share the learning rate by default.
    peak, shared = options.learning_rate, options.kind == "adamw" or options.update_scale == "rms"
    adam_peak = (None if options.kind == "adamw" else options.adam_learning_rate) or (peak if shared else None)
    if peak is None or adam_peak is None:
        missing = "learning_rate" if peak is None else "adam_learning_rate"
        raise UserError(f"optimizer.{missing} has no value; set it, or load the recipe with load_recipe, which derives it")
    groups: dict[tuple[str, float, float, float], Group] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        kind: Literal["muon", "adamw"] = "muon" if options.kind == "muon" and is_matrix(name, parameter) else "adamw"
        layer = _layer(name)
        above = layers - 1 - layer if layer is not None else layers if name.startswith("embedding.") else 0
        scale = options.lr_scales.get(kind_of(name, parameter.ndim), 1.0)
        rate = (peak if kind == "muon" else adam_peak) * options.layer_lr_decay**above * scale
        decay = options.weight_decay if decays(name, parameter) else 0.0
        groups.setdefault((kind, rate, decay, scale), Group(kind, rate, decay, scale)).parameters[name] = parameter
    return list(groups.values())


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found[1]) if found else None


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, as a plain one on the same memory; possibly empty."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_grad(parameter: Tensor) -> Tensor | None:
    """What this rank holds of a parameter's gradient; it must be placed as the parameter, already summed over the ranks."""
    grad = parameter.grad
    if isinstance(grad, DTensor):
        assert isinstance(parameter, DTensor), "a sharded gradient of a plain parameter"
        assert grad.placements == parameter.placements, f"a gradient placed {grad.placements}, its parameter {parameter.placements}"
    return None if grad is None else local(grad)


def shards(tensor: Tensor) -> int:
    """The number of distinct shards of a tensor; each has one copy per replica."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = tensor.device_mesh.mesh.shape
    return prod(size for size, placement in zip(sizes, tensor.placements, strict=True) if not placement.is_replicate())


@dataclass(frozen=True, eq=False)
class Holders:
    """Who holds what of one tensor: H ranks on a mesh of A axes, D dimensions."""

    ranks_H: np.ndarray  # numbers in the world
    places_HA: np.ndarray  # coordinates on the mesh
    boxes_HD2: np.ndarray  # per dimension the first index held and the one past the last; an empty box holds nothing


def holders(tensor: Tensor) -> Holders:
    """The holders of a tensor. A plain tensor is this rank's alone, whatever others have: its rank is called 0."""
    if not isinstance(tensor, DTensor):
        boxes = np.array([[(0, size) for size in tensor.shape]], dtype=np.int64)
        return Holders(np.zeros(1, dtype=np.int64), np.zeros((1, 1), dtype=np.int64), boxes)
    mesh = tensor.device_mesh.mesh
    places = np.indices(mesh.shape).reshape(mesh.ndim, -1)
    low, high = (np.repeat(np.array(side, dtype=np.int64)[:, None], mesh.numel(), axis=1) for side in ([0] * tensor.ndim, tensor.shape))
    # FSDP over tensor or expert parallel is a strided shard: it stands before the others on the mesh, but cuts what they have left.
    axes = sorted(range(mesh.ndim), key=lambda axis: getattr(tensor.placements[axis], "split_factor", 1) > 1)
    for axis in axes:
        placement = tensor.placements[axis]
        assert not placement.is_partial(), "a parameter whose parts are summands"
        if not placement.is_replicate():
            dim = placement.dim % tensor.ndim  # type: ignore[attr-defined]  # Shard and _StridedShard, which share no public class
            each = -(-(high[dim] - low[dim]) // mesh.shape[axis])  # as torch.chunk: the last ranks have less, or nothing
            low[dim] = np.minimum(low[dim] + each * places[axis], high[dim])
            high[dim] = np.minimum(low[dim] + each, high[dim])
    return Holders(mesh.flatten().numpy(), places.T, np.stack((low.T, high.T), axis=-1))


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of a plain tensor if it is placed as `like`; a view."""
    found = holders(like)
    here = int(np.flatnonzero(found.ranks_H == dist.get_rank())[0]) if isinstance(like, DTensor) else 0
    return whole[tuple(slice(int(first), int(last)) for first, last in found.boxes_HD2[here])]


@contextmanager
def conditional_update(tensors: Sequence[Tensor], apply: Tensor | None) -> Iterator[None]:
    """Update `tensors` in place in the body; if `apply` (0-d bool) is False, the old values are restored bit for bit.

    The selection is on the device, without host synchronization. It costs one copy of `tensors` during the body. With `apply` None the
    update is always applied, and nothing is copied.
    """
    if apply is None:
        yield
        return
    old = [tensor.clone() for tensor in tensors]
    yield
    for tensor, before in zip(tensors, old, strict=True):
        torch.where(apply, tensor, before, out=tensor)
