"""Silent corruption of replicated tensors: checksums, and a majority vote on which copy is right."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's elements, read as integers, with wrap-around; 0-d int64 on its device. Any single flipped bit changes it.

    It does not depend on the order of the summation.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    whole = flat.view(_VIEWS[flat.element_size()]) if flat.dtype != torch.bool else flat.view(torch.uint8)
    return whole.sum(dtype=torch.int64)


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The checksum of this rank's part of each tensor, by name, with a single device-to-host synchronization."""
    if not tensors:
        return {}
    sums = [checksum(tensor.to_local() if isinstance(tensor, DTensor) else tensor).cpu() for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True))


@dataclass(frozen=True)
class Deviation:
    """A rank whose copy of a tensor differs from that of the other ranks. `certain`: the majority of copies is equal and differs from
    it. In a tie, as between two ranks, every holder is listed and none is certain."""

    rank: int
    tensor: str
    certain: bool


def vote(by_rank: Sequence[Mapping[tuple[str, str], int]]) -> list[Deviation]:
    """Compare the copies. `by_rank` has, for each rank, checksums by (tensor, part); parts that only one rank holds are not compared."""
    copies: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for rank, sums in enumerate(by_rank):
        for key, value in sums.items():
            copies[key].append((rank, value))
    found = []
    for (name, _), held in copies.items():
        counts = Counter(value for _, value in held).most_common()
        if len(counts) == 1:
            continue
        certain = counts[0][1] > counts[1][1]
        found += [Deviation(rank, name, certain) for rank, value in held if not certain or value != counts[0][0]]
    return sorted(found, key=lambda one: (not one.certain, one.rank, one.tensor))
