"""Compares the replicas of weights and optimizer state bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmworks.optim.placement import holders
from lmworks.watch.checksum import Deviation, checksums, vote


def compare_replicas(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> list[Deviation]:
    """Compare the parts of tensors that several ranks of a group hold. Returns the ranks whose copy differs, the same list on all ranks.

    Every rank sends eight bytes per tensor. A part that only one rank holds cannot be compared.
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
