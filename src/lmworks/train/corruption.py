"""Tests for silent data corruption: arithmetic that is not reproducible, and replicas that differ. Every rank makes the same calls.

Replicas of weights and optimizer state are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmworks.checkpoint.communicator import Communicator
from lmworks.optim.groups import holders
from lmworks.optim.optimizer import Updates
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.shards.batch import Batch
from lmworks.watch.monitors import Deviation, checksums, differing, outlying, trace, vote


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


@dataclass(frozen=True)
class Corruption:
    """Corruption that was found, and the ranks at fault: if not `certain`, all ranks that may be."""

    ranks: list[int]
    certain: bool
    what: str

    def __str__(self) -> str:
        who = ", ".join(map(str, self.ranks))
        said = f"rank {who}" if len(self.ranks) == 1 else f"ranks {who}" if self.certain else f"one of the ranks {who}"
        return f"{said}: {self.what}"


def find_corruption(
    model: ParallelModel, optimizer: Updates, batch: Batch, micro_batch_size: int, communicator: Communicator
) -> Corruption | None:
    """Compare the copies of weights and optimizer state, then run a micro-batch of this rank's share twice, or three times where gradients
    need not repeat. Gradients are dropped."""
    return _copies(model, optimizer) or _arithmetic(
        model, optimizer, batch.rows(0, min(micro_batch_size, len(batch.tokens))), micro_batch_size, communicator
    )


def _copies(model: ParallelModel, optimizer: Updates) -> Corruption | None:
    state: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {f"optimizer.{name}": tensor for name, tensor in optimizer.state_dict().items()}
    found = compare_replicas(state, model.ranks.world_group)
    if not found:
        return None
    certain = found[0].certain
    blamed = [one for one in found if one.certain is certain]
    names = sorted({one.tensor for one in blamed})
    what = f"its copy of {names[0]} differs from the others'" + (f", and {len(names) - 1} more" if len(names) > 1 else "")
    return Corruption(sorted({one.rank for one in blamed}), certain, what)


def _arithmetic(
    model: ParallelModel, optimizer: Updates, batch: Batch, micro_batch_size: int, communicator: Communicator
) -> Corruption | None:
    rows = micro_batch_size * model.ranks.size("dp")

    def run() -> Tensor:
        return model.forward_backward(batch, rows, micro_batch_size, 1.0).cross_entropy

    optimizer.zero_grad()
    torch.manual_seed(batch.step)
    blocks = {f"layer {name}": block for part in model.parts for name, block in part.layers.named_children()}
    parameters = dict(model.named_parameters())
    runs = [trace(run, blocks, parameters) for _ in range(2)]
    by_rank = communicator.all_gather(differing(*runs))
    if any(by_rank) and not _repeats(model.device):
        runs.append(trace(run, blocks, parameters))
        by_rank = communicator.all_gather(outlying(runs, torch.finfo(model.compute_dtype).eps))
    # Gradients of weights are sums over ranks, so that what one has done wrong shows on others too; the rest is a rank's own.
    own = {rank: [what for what in found if not _summed(what)] for rank, found in enumerate(by_rank)}
    certain = [rank for rank, found in own.items() if found]
    suspects = certain or [rank for rank, found in enumerate(by_rank) if found]
    if not suspects:
        return None
    what = (own[suspects[0]] or by_rank[suspects[0]])[0]
    return Corruption(suspects, bool(certain) or len(suspects) == 1, f"the {what} was another one when the same micro-batch was run again")


def _repeats(device: torch.device) -> bool:
    """Whether backward passes give the same bits each time."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def _summed(what: str) -> bool:
    return what.startswith("gradient of ") and not what.startswith("gradient of layer ")
