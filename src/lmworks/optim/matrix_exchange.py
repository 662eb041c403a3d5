"""Gathers full matrices from sharded parameters: one of the ranks that hold a matrix is its owner and computes the update for all.

A bucket of matrices takes two all-to-alls: shards to the owners, updates back to every holder. Of replicas one sends and all receive, so
that no work is done twice and replicas stay equal bit for bit. A matrix that only one rank holds stays there; in a single process all do,
and nothing is copied.

Shapes: a parameter is one matrix (R, C) or E of them (E, R, C); a stack has N matrices with R <= C. G is the index of a rank in a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmworks.optim.groups import Holders, holders, local

Arrival = Callable[[], list[Tensor]]


@dataclass(frozen=True, eq=False)
class MatrixRun:
    """`count` matrices of a parameter, from index `first` on, that the same ranks hold in the same way. One of these ranks owns them."""

    name: str
    parameter: Tensor
    first: int
    count: int
    members_H: np.ndarray  # G of each holder
    places_HA: np.ndarray
    boxes_HD2: np.ndarray  # in E, R, C
    owner: int = 0  # which of the holders

    @property
    def owner_G(self) -> int:
        return int(self.members_H[self.owner])

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of its matrices as they are orthogonalized: R <= C."""
        rows, cols = sorted(self.parameter.shape[-2:])
        return rows, cols

    @property
    def elements(self) -> int:
        return self.count * prod(self.shape)

    @property
    def cost(self) -> int:
        """The cost of Newton-Schulz, up to a factor."""
        return self.elements * self.shape[0]

    def elements_H(self) -> np.ndarray:
        """The number of elements that each holder has."""
        elements: np.ndarray = self.count * (self.boxes_HD2[:, 1:, 1] - self.boxes_HD2[:, 1:, 0]).prod(axis=1)
        return elements

    @cached_property
    def senders(self) -> frozenset[int]:
        """The holders that send their shards to the owner: for each shard the nearest one on the mesh, preferably the owner itself."""
        near = np.argsort((self.places_HA != self.places_HA[self.owner]).sum(axis=1), kind="stable")
        _, first = np.unique(self.boxes_HD2[near], axis=0, return_index=True)
        return frozenset(near[first].tolist())


@dataclass(frozen=True, eq=False)
class LocalPart:
    """The part of a run that this rank holds."""

    run: MatrixRun
    first: int  # in the local tensor
    shape: tuple[int, int, int]

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a local tensor with the layout of the parameter; a view."""
        *leading, rows, cols = tensor.shape
        return tensor.view(prod(leading), rows, cols)[self.first : self.first + self.run.count]


@dataclass(frozen=True)
class StackSlot:
    """The position of a holder's part of a run in the owner's stacks."""

    stack: int
    first: int
    count: int
    rows: slice
    cols: slice
    tall: bool

    def of(self, stacks: Sequence[Tensor]) -> Tensor:
        """The part in the orientation of its parameter; a view."""
        matrices = stacks[self.stack][self.first : self.first + self.count]
        return (matrices.mT if self.tall else matrices)[:, self.rows, self.cols]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.count, self.rows.stop - self.rows.start, self.cols.stop - self.cols.start


class Exchange:
    """An all-to-all of parts over `group`; without a group the parts are returned unchanged."""

    def __init__(
        self, group: dist.ProcessGroup | None, sent_G: Sequence[int], received_G: Sequence[int], shapes: list[tuple[int, int, int]]
    ) -> None:
        self.group, self.sent_G, self.received_G, self.shapes = group, list(sent_G), list(received_G), shapes

    def start(self, parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Arrival:
        """Send `parts`, ordered by receiver, in `dtype`; the returned function waits for the received parts, ordered by sender."""
        if self.group is None:
            return lambda: parts
        outgoing = torch.empty(sum(self.sent_G), dtype=dtype, device=device)
        incoming = torch.empty(sum(self.received_G), dtype=dtype, device=device)
        for place, part in zip(outgoing.split([part.numel() for part in parts]), parts, strict=True):
            place.view(part.shape).copy_(part)
        work = dist.all_to_all_single(incoming, outgoing, self.received_G, self.sent_G, group=self.group, async_op=True)

        def arrived(keep: Tensor = outgoing) -> list[Tensor]:
            work.wait()
            flat = incoming.split([prod(shape) for shape in self.shapes])
            return [part.view(shape) for part, shape in zip(flat, self.shapes, strict=True)]

        return arrived


@dataclass(frozen=True)
class Bucket:
    """Matrices that are exchanged together, from the perspective of this rank."""

    device: torch.device
    parts: list[LocalPart]  # held by this rank, sorted by owner: the order in which updates are received
    sends: list[int]  # indices of the parts that this rank sends to their owners
    stacks: list[tuple[int, int, int]]  # owned by this rank
    taken: list[StackSlot]  # received into the stacks, by sender
    given: list[StackSlot]  # sent from the stacks, by holder
    collect: Exchange
    distribute: Exchange

    @property
    def shared(self) -> bool:
        """Whether anything is communicated."""
        return self.collect.group is not None


def plan_exchange(parameters: Mapping[str, Tensor], limit: int, process_groups: Iterable[dist.ProcessGroup] = ()) -> list[Bucket]:
    """Divide the matrices of all parameters into buckets, the same on all ranks that share a parameter.

    In a bucket no rank owns more than `limit` elements, unless a single matrix has more, and no rank holds more, unless there are fewer
    matrices than ranks. If none of `process_groups` has exactly the ranks of a mesh, a group is created: all ranks of a mesh must call
    this with the same parameters in the same order.
    """
    by_ranks: dict[tuple[int, ...], list[MatrixRun]] = defaultdict(list)
    groups = {tuple(dist.get_process_group_ranks(group)): group for group in process_groups}
    for name, parameter in parameters.items():
        found = holders(parameter)
        ranks = tuple(sorted(found.ranks_H.tolist()))
        if len(ranks) > 1 and ranks not in groups:
            groups[ranks] = _group(parameter, ranks)
        by_ranks[ranks] += _runs(name, parameter, found, ranks, limit)
    buckets, alone = [], []
    for ranks, runs in by_ranks.items():
        group = groups[ranks] if len(ranks) > 1 else None
        me = dist.get_rank(group) if group is not None else 0
        buckets += [_bucket(cut, group, me, len(ranks), limit) for cut in _cut(_assign_owners(runs, len(ranks)), len(ranks), limit)]
        alone += [replace(run, members_H=np.zeros(1, dtype=int)) for run in runs if run.members_H.tolist() == [me]]
    return buckets + [_bucket(stack, None, 0, 1, limit) for stack in _stacks(alone, limit)]


def _group(parameter: Tensor, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A process group of all ranks of a parameter's mesh, ordered by number."""
    assert isinstance(parameter, DTensor)
    assert dist.group.WORLD is not None
    there = dist.group.WORLD if parameter.device_mesh.ndim > 1 else parameter.device_mesh.get_group()
    if tuple(dist.get_process_group_ranks(there)) == ranks:
        return there
    return dist.new_group(list(ranks), use_local_synchronization=True)


def _runs(name: str, parameter: Tensor, found: Holders, ranks: tuple[int, ...], limit: int) -> Iterator[MatrixRun]:
    """Split a parameter where its holders change and where a stack is full; matrices with several holders also into one run per holder."""
    boxes = found.boxes_HD2
    if parameter.ndim == 2:
        boxes = np.concatenate((np.broadcast_to([0, 1], (len(boxes), 1, 2)), boxes), axis=1)
    assert boxes.shape[1] == 3, f"{name} is neither a matrix nor a stack of matrices"
    filled = (boxes[..., 1] > boxes[..., 0]).all(axis=1)
    at_once = max(1, limit // prod(parameter.shape[-2:]))
    for low, high in pairwise(np.unique(boxes[filled, 0]).tolist()):
        here = np.flatnonzero(filled & (boxes[:, 0, 0] <= low) & (boxes[:, 0, 1] >= high))
        size = min(at_once, -(-(high - low) // len(here)))
        for first in range(low, high, size):
            members = np.searchsorted(ranks, found.ranks_H[here])
            yield MatrixRun(name, parameter, first, min(size, high - first), members, found.places_HA[here], boxes[here])


def _assign_owners(runs: Sequence[MatrixRun], size: int) -> list[MatrixRun]:
    """Assign an owner to each run with several holders, most expensive first: the holder with the least work, preferably one with all of
    it."""
    load_G = np.zeros(size)
    for run in runs:
        if len(run.members_H) == 1:
            load_G[run.members_H] += run.cost
    owned = []
    for run in sorted((run for run in runs if len(run.members_H) > 1), key=lambda run: -run.cost):
        whole = np.flatnonzero(run.elements_H() == run.elements)
        able = whole if len(whole) else np.arange(len(run.members_H))
        owner = int(able[np.argmin(load_G[run.members_H[able]])])
        load_G[run.members_H[owner]] += run.cost
        owned.append(replace(run, owner=owner))
    return owned


def _cut(runs: Sequence[MatrixRun], size: int, limit: int) -> list[list[MatrixRun]]:
    """Consecutive runs as long as no rank owns more than `limit` elements, nor holds more once every rank could own something."""
    buckets: list[list[MatrixRun]] = []
    owned_G = held_G = np.zeros(size, dtype=np.int64)
    for run in runs:
        owned, held = owned_G[run.owner_G], held_G[run.members_H].max()
        if not buckets or (owned and owned + run.elements > limit) or (held + run.elements_H().max() > limit and len(buckets[-1]) >= size):
            buckets.append([])
            owned_G, held_G = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        buckets[-1].append(run)
        owned_G[run.owner_G] += run.elements
        held_G[run.members_H] += run.elements_H()
    return buckets


def _stacks(runs: Sequence[MatrixRun], limit: int) -> list[list[MatrixRun]]:
    """Runs of equal shape, up to transposition, together; at most `limit` elements unless one matrix alone has more."""
    stacks: dict[tuple[int, int], list[list[MatrixRun]]] = defaultdict(list)
    for run in runs:
        same = stacks[run.shape]
        if not same or sum(other.elements for other in same[-1]) + run.elements > limit:
            same.append([])
        same[-1].append(run)
    return [stack for same in stacks.values() for stack in same]


def _bucket(runs: Sequence[MatrixRun], group: dist.ProcessGroup | None, me: int, size: int, limit: int) -> Bucket:
    """A bucket as the me-th of `size` ranks sees it. What two ranks exchange is in the order of `runs` on both."""
    parts: list[LocalPart] = []
    sends: list[int] = []
    for run in sorted(runs, key=lambda run: run.owner_G):
        for holder in np.flatnonzero(run.members_H == me).tolist():
            if holder in run.senders:
                sends.append(len(parts))
            parts.append(_part(run, holder))
    stacks = _stacks([run for run in runs if run.owner_G == me], limit)
    order = {id(run): index for index, run in enumerate(runs)}
    taken, given = [], []
    for number, stack in enumerate(stacks):
        first = 0
        for run in stack:
            for holder, member in enumerate(run.members_H.tolist()):
                place = _place(run, holder, number, first)
                given.append((member, order[id(run)], place))
                if holder in run.senders:
                    taken.append((member, order[id(run)], place))
            first += run.count
    for places in (taken, given):
        places.sort(key=lambda entry: entry[:2])
    updates_G = _sums(((part.run.owner_G, part.shape) for part in parts), size)
    parts_G = _sums(((parts[index].run.owner_G, parts[index].shape) for index in sends), size)
    taken_G, given_G = (_sums(((member, place.shape) for member, _, place in places), size) for places in (taken, given))
    return Bucket(
        device=runs[0].parameter.device, parts=parts, sends=sends,
        stacks=[(sum(run.count for run in stack), *stack[0].shape) for stack in stacks],
        taken=[place for *_, place in taken], given=[place for *_, place in given],
        collect=Exchange(group, parts_G, taken_G, [place.shape for *_, place in taken]),
        distribute=Exchange(group, given_G, updates_G, [part.shape for part in parts]),
    )  # fmt: skip


def _part(run: MatrixRun, holder: int) -> LocalPart:
    box = run.boxes_HD2[holder].tolist()
    rows, cols = (last - first for first, last in box[1:])
    here = local(run.parameter)
    assert here.shape[-2:] == (rows, cols), f"{run.name} has local shape {tuple(here.shape)}, but its placement says {box}"
    return LocalPart(run, run.first - box[0][0], (run.count, rows, cols))


def _place(run: MatrixRun, holder: int, stack: int, first: int) -> StackSlot:
    rows, cols = (slice(*bounds) for bounds in run.boxes_HD2[holder, 1:].tolist())
    return StackSlot(stack, first, run.count, rows, cols, tall=run.parameter.shape[-2] > run.parameter.shape[-1])


def _sums(entries: Iterable[tuple[int, tuple[int, int, int]]], size: int) -> list[int]:
    """Elements for each rank of a group."""
    sums = [0] * size
    for member, shape in entries:
        sums[member] += prod(shape)
    return sums
