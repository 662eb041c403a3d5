"""Which rank writes which slice of which tensor, computed by each rank without a coordinator.

A plan gathered on one rank grows with ranks times tensors: gigabytes for a large model on thousands of ranks. Here the ranks that hold
the same slice share the writing by a rule that each of them can compute. They exchange one hash of 8 bytes per rank.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmworks.checkpoint.communicator import Communicator


@dataclass(frozen=True)
class TensorSlice:
    """A rectangular slice of a tensor: `offsets` and `sizes` within the global `shape`. `values()` returns its elements, on any device."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


def local_slice(name: str, tensor: Tensor) -> TensorSlice | None:
    """The slice of a tensor that this rank holds: all of a plain tensor, the local shard of a DTensor. None if it is empty."""
    if not isinstance(tensor, DTensor):
        plain = tensor.detach()
        return TensorSlice(name, tensor.dtype, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape), lambda: plain)
    if tensor.device_mesh.get_coordinate() is None:
        return None
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    assert not any(placement.is_partial() for placement in tensor.placements), f"{name} is a partial sum"
    (item,) = create_default_local_save_plan({name: tensor}, False).items
    assert item.tensor_data is not None
    box, local = item.tensor_data.chunk, tensor.to_local().detach()
    if not local.numel() and tensor.numel():  # an uneven split leaves some ranks nothing
        return None
    assert tuple(box.sizes) == tuple(local.shape), f"{name}: torch places {tuple(box.sizes)}, the rank holds {tuple(local.shape)}"
    return TensorSlice(name, tensor.dtype, tuple(tensor.shape), tuple(box.offsets), tuple(box.sizes), lambda: local)


def slices_to_write(tensors: dict[str, Tensor], communicator: Communicator) -> list[TensorSlice]:
    """The slices that this rank writes, sorted by name. Each slice of each tensor is written by one of the ranks that hold it; these share
    the bytes evenly. Called by all ranks of the communicator, which may hold different tensors. Plain tensors of one name must be equal."""
    holders_of = _holders(tensors, communicator)
    load: dict[tuple[int, ...], dict[int, int]] = {}
    mine = []
    for name in sorted(tensors):
        one = local_slice(name, tensors[name])
        if one is None:
            continue
        holders = holders_of(name, tensors[name])
        # All ranks in `holders` see the same slices with these holders, so all of them count alike.
        taken = load.setdefault(holders, dict.fromkeys(holders, 0))
        writer = min(holders, key=lambda rank: taken[rank])
        taken[writer] += one.bytes
        if writer == communicator.rank:
            mine.append(one)
    return mine


def _holders(tensors: dict[str, Tensor], communicator: Communicator) -> Callable[[str, Tensor], tuple[int, ...]]:
    """A function that returns the ranks that hold the same slice of a tensor as this rank."""
    kinds = [_kind(name, tensor) for name, tensor in sorted(tensors.items()) if not isinstance(tensor, DTensor)]
    plain = _plain_holders(kinds, communicator)
    found: dict[object, tuple[int, ...]] = {}

    def holders(name: str, tensor: Tensor) -> tuple[int, ...]:
        if not isinstance(tensor, DTensor):
            return plain[_kind(name, tensor)]
        mesh, placements = tensor.device_mesh, tensor.placements
        if (key := (mesh, placements)) not in found:
            place = mesh.get_coordinate()
            assert place is not None
            copies = tuple(slice(None) if at.is_replicate() else place[axis] for axis, at in enumerate(placements))
            found[key] = tuple(sorted(mesh.mesh[copies].reshape(-1).tolist()))
        return found[key]

    return holders


def _kind(name: str, tensor: Tensor) -> str:
    return f"{name} {tuple(tensor.shape)} {tensor.dtype}"


def _plain_holders(kinds: Sequence[str], communicator: Communicator) -> dict[str, tuple[int, ...]]:
    """The ranks that hold each plain tensor of this rank. Ranks with equal lists of tensors are grouped by a hash of the list, and one rank
    of each group (such as a pipeline stage) broadcasts its list."""
    if communicator.group is None:
        return dict.fromkeys(kinds, (0,))
    own = int.from_bytes(hashlib.sha256("\n".join(kinds).encode()).digest()[:8], "little")
    alike: dict[int, list[int]] = defaultdict(list)
    for rank, digest in enumerate(communicator.all_gather(own)):
        alike[digest].append(rank)
    found: dict[str, list[int]] = defaultdict(list)
    for ranks in alike.values():
        for kind in kinds if len(alike) == 1 else communicator.broadcast(list(kinds), ranks[0]):
            found[kind].extend(ranks)
    return {kind: tuple(sorted(found[kind])) for kind in kinds}
