"""Parameters placed as a parallel model's are, by `distribute_tensor` and `fully_shard`: what optim's own code is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

SHAPES = {
    "embedding.weight": (11, 6), "layers.0.attention.norm": (7,), "layers.0.wide": (16, 24), "layers.0.tall": (24, 16),
    "layers.0.odd": (5, 9), "layers.0.thin": (2, 20), "layers.1.router": (6, 12), "layers.1.experts.up": (6, 8, 12),
    "layers.1.experts.down": (6, 12, 8), "layers.1.square": (12, 12), "head.weight": (12, 6), "norm.weight": (6,),
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """How a parameter is placed: (axis, dim) by tensor or expert parallelism, then FSDP over `data`; the first of two replicates."""

    inner: tuple[tuple[str, int], ...] = ()
    data: tuple[str, ...] = ()
    dim: int = 0


@dataclass(frozen=True)
class Case:
    """A mesh, and the rule for the names that contain a word; the first that fits."""

    mesh: dict[str, int]
    rules: dict[str, Rule] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return int(np.prod(list(self.mesh.values())))

    def rule(self, name: str) -> Rule:
        return next(rule for word, rule in self.rules.items() if word in name)


def _tensor_parallel(data: tuple[str, ...]) -> dict[str, Rule]:
    """Column, row and vocabulary parallel matrices; what is left is only in the data's meshes, and each tensor rank has a copy."""
    column, row, copy = Rule((("tp", 0),), data), Rule((("tp", 1),), data), Rule((), data)
    return {"wide": row, "tall": column, "square": column, "thin": row, "embedding": column, "head": column, "experts.up": row, "": copy}


CASES = {
    "one rank": Case({"fsdp": 1}, {"": Rule(data=("fsdp",))}),
    "fsdp 2": Case({"fsdp": 2}, {"": Rule(data=("fsdp",))}),
    "fsdp 3, uneven": Case({"fsdp": 3}, {"": Rule(data=("fsdp",))}),
    "fsdp 8, ranks with nothing": Case({"fsdp": 8}, {"": Rule(data=("fsdp",))}),
    "copies on 2": Case({"dp": 2, "fsdp": 1}, {"": Rule(data=("dp", "fsdp"))}),
    "hsdp 2 x 2": Case({"dp": 2, "fsdp": 2}, {"": Rule(data=("dp", "fsdp"))}),
    "hsdp 3 x 2": Case({"dp": 3, "fsdp": 2}, {"": Rule(data=("dp", "fsdp"))}),
    "tp 2, the rest plain": Case({"tp": 2}, _tensor_parallel(())),
    "tp 3, uneven": Case({"tp": 3}, {"odd": Rule((("tp", 0),)), **_tensor_parallel(())}),
    "fsdp 2 over tp 2": Case({"fsdp": 2, "tp": 2}, _tensor_parallel(("fsdp",))),
    "fsdp 4 over tp 2, uneven": Case({"fsdp": 4, "tp": 2}, _tensor_parallel(("fsdp",))),
    "hsdp 2 x 2 over tp 2": Case({"dp": 2, "fsdp": 2, "tp": 2}, _tensor_parallel(("dp", "fsdp"))),
    "axes of one rank": Case({"dp": 1, "fsdp": 2, "tp": 1}, _tensor_parallel(("dp", "fsdp"))),
    "ep 2 in fsdp 2": Case({"efsdp": 1, "ep": 2}, {"experts": Rule((("ep", 0),), ("efsdp",)), "": Rule(data=("ep",))}),
    "ep 2, efsdp 2": Case({"efsdp": 2, "ep": 2}, {"experts": Rule((("ep", 0),), ("efsdp",)), "": Rule(data=("efsdp",))}),
    "ep 2, efsdp 4 by rows": Case({"efsdp": 4, "ep": 2}, {"experts": Rule((("ep", 0),), ("efsdp",), 1), "": Rule(data=("ep",))}),
    "ep 2 with copies": Case({"dp": 2, "ep": 2}, {"experts": Rule((("ep", 0),), ("dp",)), "": Rule(data=("dp", "ep"))}),
    "efsdp 2, ep 2, tp 2": Case(
        {"efsdp": 2, "ep": 2, "tp": 2},
        {"up": Rule((("ep", 0), ("tp", 1)), ("efsdp",)), "down": Rule((("ep", 0), ("tp", 2)), ("efsdp",)), **_tensor_parallel(("efsdp",))},
    ),
    "hsdp 2 x 2, ep 2": Case(
        {"dp": 2, "efsdp": 2, "ep": 2}, {"experts": Rule((("ep", 0),), ("dp", "efsdp")), "": Rule(data=("dp", "efsdp"))}
    ),
}  # fmt: skip


class Placer:
    """Places whole tensors by a case's rules, on the ranks of this world."""

    def __init__(self, case: Case, mesh: DeviceMesh | None = None) -> None:
        self.case = case
        self.mesh = mesh or init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))

    def __call__(self, whole: Mapping[str, np.ndarray]) -> dict[str, nn.Parameter]:
        return {name: self._one(torch.from_numpy(array.copy()), self.case.rule(name)) for name, array in whole.items()}

    def _one(self, tensor: Tensor, rule: Rule) -> nn.Parameter:
        if rule.inner:
            tensor = distribute_tensor(tensor, self._part(tuple(axis for axis, _ in rule.inner)), [Shard(dim) for _, dim in rule.inner])
        module = nn.Module()
        module.parameter = nn.Parameter(tensor)
        if rule.data:
            fully_shard(module, mesh=self._part(rule.data), shard_placement_fn=lambda _: Shard(rule.dim))
        return module.parameter

    def _part(self, axes: tuple[str, ...]) -> DeviceMesh:
        return self.mesh[axes if len(axes) > 1 else axes[0]]


def here(tensor: Tensor) -> np.ndarray:
    """What this rank holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def stage_mesh(stages: int, sizes: dict[str, int]) -> DeviceMesh:
    """The mesh of this rank's pipeline stage."""
    mesh = init_device_mesh("cpu", (stages, *sizes.values()), mesh_dim_names=("pp", *sizes))
    return mesh[tuple(sizes) if len(sizes) > 1 else next(iter(sizes))]
