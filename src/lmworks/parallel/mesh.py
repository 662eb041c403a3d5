"""The ranks of a layout: one device mesh, and the process groups of its axes.

The global rank is the row-major index over the axes pp, dp_replicate, dp_shard, cp, tp, slowest first. The ranks of a tp group have
consecutive numbers, so a launcher that fills one machine after another keeps them on one machine. The ranks of `ep` are the fast-varying
part of (dp_shard, cp).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lmworks.errors import UserError
from lmworks.recipe.schema.layout import Layout, ep_problems

# FSDP2 needs replicas and shards as two dimensions of one mesh, and some of ours are flattened from several.
warnings.filterwarnings("ignore", message="Slicing a flattened dim", module="torch.distributed.device_mesh")
# `one` has size 1, for parameters that are not sharded.
_DIGITS = ("pp", "dp_replicate", "dp_shard_out", "dp_shard_in", "cp_out", "cp_in", "one", "tp")
_FLAT = {
    "dp": ("dp_replicate", "dp_shard_out", "dp_shard_in"),  # ranks that read different sequences
    "cp": ("cp_out", "cp_in"),  # ranks that share a sequence
    "loss": ("dp_replicate", "dp_shard_out", "dp_shard_in", "cp_out", "cp_in"),  # ranks whose losses add up to the step's
    "fsdp": ("dp_shard_out", "dp_shard_in", "cp_out", "cp_in"),  # ranks that weights are sharded over
    "ep": ("dp_shard_in", "cp_in"),  # ranks that hold different experts
    "efsdp": ("dp_shard_out", "cp_out"),  # ranks that the weights of one expert are sharded over
    "ecopies": ("dp_replicate", "dp_shard_out", "cp_out"),  # ranks that hold parts or copies of one expert
    "weights": ("dp_replicate", "dp_shard_out", "dp_shard_in", "cp_out", "cp_in", "tp"),  # ranks that hold parts or copies of one stage
}
AXES = ("pp", "dp_replicate", "tp", *_FLAT)
_Value = TypeVar("_Value")


class Ranks:
    """The mesh of `layout` over the initialized process group; without a process group, every axis has size 1.

    Axes: pp, dp_replicate, tp, and those of `_FLAT`: dp, cp, loss, fsdp, ep, efsdp, weights. With `zero` 0 nothing is sharded: the
    ranks of dp_shard and cp hold copies (dp_shard still reads different sequences).
    """

    def __init__(self, layout: Layout, device_type: str = "cpu") -> None:
        self.layout = layout
        for problem in ep_problems(layout):
            raise UserError(f"layout: {problem}")
        cp_in = min(layout.ep, layout.cp)
        dp_in = layout.ep // cp_in
        sizes = (layout.pp, layout.dp_replicate, layout.dp_shard // dp_in, dp_in, layout.cp // cp_in, cp_in, 1, layout.tp)
        self._sizes = dict(zip(_DIGITS, sizes, strict=True))
        self.world = prod(sizes)
        self._mesh: DeviceMesh | None = None
        self._flat: dict[str, DeviceMesh] = {}
        if dist.is_available() and dist.is_initialized():
            if (started := dist.get_world_size()) != self.world:
                raise UserError(f"the layout has {self.world} ranks, but {started} were started; set layout or start {self.world}")
            self._mesh = init_device_mesh(device_type, sizes, mesh_dim_names=_DIGITS)
            self._flat = {name: self._mesh[digits]._flatten(name) for name, digits in _FLAT.items()}
        elif self.world != 1:
            raise UserError(f"the layout has {self.world} ranks, but one was started; use: lmworks launch local RECIPE")

    @property
    def distributed(self) -> bool:
        """Whether there is a process group at all."""
        return self._mesh is not None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only rank that writes metrics, ledger and terminal output."""
        return self._mesh is None or dist.get_rank() == 0

    @property
    def global_rank(self) -> int:
        """The number of this rank among all ranks."""
        return 0 if self._mesh is None else dist.get_rank()

    def size(self, axis: str) -> int:
        return prod(self._sizes[digit] for digit in _FLAT.get(axis, (axis,)))

    def rank(self, axis: str) -> int:
        """This rank's index along an axis."""
        return 0 if self._mesh is None else self.mesh(axis).get_local_rank()

    def mesh(self, *axes: str) -> DeviceMesh:
        """The part of the mesh along one or more axes, through this rank."""
        assert self._mesh is not None
        if len(axes) == 1 and axes[0] in self._flat:
            return self._flat[axes[0]]
        return self._mesh[axes if len(axes) > 1 else axes[0]]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group along an axis; None if it has one rank."""
        return None if self.size(axis) == 1 else self.mesh(axis).get_group()

    def all_reduce(self, tensor: Tensor, axis: str) -> Tensor:
        """Sum a tensor over the ranks of an axis, in place; returns it."""
        if self.size(axis) > 1:
            dist.all_reduce(tensor, group=self.group(axis))
        return tensor

    def process_groups(self) -> list[dist.ProcessGroup]:
        """All process groups with more than one rank."""
        return [group for group in (self.world_group, *map(self.group, AXES)) if group is not None and group.size() > 1]

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks; None in a single process."""
        return dist.group.WORLD if self._mesh is not None else None

    def broadcast(self, value: Any) -> None:
        """Send an object from rank 0 to all others, which call `receive_broadcast`; they may wait for days."""
        if self._mesh is not None:
            self._broadcast([value])

    def receive_broadcast(self) -> Any:
        """The object that rank 0 sends with `broadcast`."""
        received: list[Any] = [None]
        self._broadcast(received)
        return received[0]

    def first(self, work: Callable[[], _Value]) -> _Value:
        """What `work`, which only rank 0 does, returns, on all ranks; the others may wait for days. What it raises is raised on all."""
        if self._mesh is None:
            return work()
        value, failure = None, None
        if self.is_first:
            try:
                value = work()
            except Exception as error:
                failure = error
            self.broadcast((value, failure))
        else:
            value, failure = self.receive_broadcast()
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]

    def _broadcast(self, values: list[Any]) -> None:
        world, cpu = self.world_group, torch.device("cpu")
        assert world is not None
        usual = world._get_backend(cpu).options._timeout  # there is no public way to read what `set_timeout` has set
        world.set_timeout(timedelta(days=365))
        try:
            dist.broadcast_object_list(values, 0, group=world, device=cpu)
        finally:
            world.set_timeout(usual)

    def all_reduce_max(self, value: float) -> float:
        """The largest value of all ranks."""
        if self._mesh is None:
            return value
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    def barrier(self) -> None:
        if self._mesh is not None:
            dist.barrier()


def alone() -> Ranks:
    """The ranks of a single process."""
    return Ranks(Layout())


def own_device() -> torch.device:
    """This rank's GPU if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def backend_for(device: torch.device) -> str:
    """The backend of process groups on such devices; collectives of CPU tensors always use gloo."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
