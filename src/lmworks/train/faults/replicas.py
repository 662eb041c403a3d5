"""The copies that ranks hold of weights and optimizer state, compared bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmworks.optim.placement import holders
from lmworks.watch.checksum import Deviation, checksums, vote


def compare(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> list[Deviation]:
    """Compare what all ranks of the group hold in common; whose copy deviates, by number in the group, and on all ranks alike.

    Every rank sends eight bytes for each tensor. A part that only one rank holds cannot be compared.
    """
    if group is None:
        return []
    sums = checksums(tensors)
    mine = {(name, _part(tensor)): sums[name] for name, tensor in tensors.items()}
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return vote(found)


def _part(tensor: Tensor) -> str:
    """Which part of the whole this rank holds. Ranks with equal parts hold copies of each other."""
    if not isinstance(tensor, DTensor):
        return "whole"
    found = holders(tensor)
    (place,) = (found.ranks_H == dist.get_rank()).nonzero()[0]
    return " ".join(f"{first}:{past}" for first, past in found.boxes_HD2[place].tolist())
