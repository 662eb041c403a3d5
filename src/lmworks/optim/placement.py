"""The placement of sharded tensors: the local part, and the slice that each rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


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
