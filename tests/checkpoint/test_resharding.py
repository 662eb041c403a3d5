"""A checkpoint of any layout loads on any other, bit for bit; ranks may hold different tensors; nothing is written twice."""

from __future__ import annotations

import random
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lmworks.checkpoint import Checkpoints, load, tensor_files, verify
from lmworks.checkpoint.tensor_files import Reader, incomplete_tensors, read_table
from lmworks.errors import UserError
from lmworks.recipe.schema.artifacts import Checkpoints as Options
from rank_pool import RankPool

# Mesh shapes by world size: one axis, two, three; no powers of two among them.
MESHES = {1: [(1,)], 2: [(2,), (2, 1)], 3: [(3,), (1, 3)], 4: [(4,), (2, 2)], 6: [(6,), (2, 3), (3, 2)], 8: [(8,), (2, 2, 2), (2, 4)]}
SHAPES = {
    "matrix": (7, 6), "experts": (5, 3, 4), "wide": (2, 11), "norm": (5,), "bf16": (9, 2), "one": (1,), "empty": (0, 4), "even": (8, 8),
}  # fmt: skip


def whole(shift: int = 0) -> dict[str, torch.Tensor]:
    """Every element of every tensor differs from its neighbours'."""
    tensors = {name: torch.arange(float(prod(shape))).reshape(shape) + shift for name, shape in SHAPES.items()}
    tensors["bf16"] = tensors["bf16"].bfloat16()
    return tensors


def draw(generator: random.Random, world: int) -> dict[str, Any]:
    """A random mesh, and by tensor its placement along each axis (None: a plain tensor); as plain values that reach other processes."""
    mesh = generator.choice(MESHES[world])
    places = {}
    for name, shape in SHAPES.items():
        one = [generator.choice([None, *range(len(shape))]) for _ in mesh]
        places[name] = None if generator.random() < 0.15 else one
    return {"world": world, "mesh": mesh, "places": places}


def state_of(layout: dict[str, Any], blank: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", layout["mesh"])
    tensors = {}
    for name, tensor in whole().items():
        places, values = layout["places"][name], torch.full_like(tensor, -1) if blank else tensor
        placements = places and [Replicate() if dim is None else Shard(dim) for dim in places]
        tensors[name] = distribute_tensor(values, mesh, placements, src_data_rank=None) if placements else values.clone()
    return {"model": tensors, "lr": 0.0 if blank else 0.5}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save(directory: str, layout: dict[str, Any]) -> None:
    with Checkpoints(Path(directory), Options(keep_last=9), {"model": "a"}) as checkpoints:
        checkpoints.save(1, state_of(layout, blank=False), {"step": 1})


def load_and_compare(directory: str, layout: dict[str, Any]) -> list[str]:
    """Names of the tensors that did not come back."""
    state = state_of(layout, blank=True)
    with Checkpoints(Path(directory), Options(keep_last=9), {"model": "a"}) as checkpoints:
        assert checkpoints.load_latest(state) == {"step": 1}
    assert state["lr"] == 0.5
    return [name for name, tensor in whole().items() if not torch.equal(full(state["model"][name]), tensor)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_any_layout_loads_on_any_other(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    worlds = list(MESHES)
    generator.shuffle(worlds)
    for number, (here, there) in enumerate(zip(worlds, [*worlds[1:], worlds[0]], strict=True)):
        before, after, directory = draw(generator, here), draw(generator, there), tmp_path / str(number)
        ranks.run(save, here, str(directory), before)
        assert [row["good"] for row in verify(directory)] == [True]
        table = read_table(directory / "step-00000001")
        assert not incomplete_tensors(table)
        written = sum(path.stat().st_size for path in (directory / "step-00000001").glob("data-*.bin"))
        assert written == sum(tensor.numel() * tensor.element_size() for tensor in whole().values()), f"not once each: {before}"
        assert ranks.run(load_and_compare, there, str(directory), after) == [[]] * there, (before, after)
    alone = {"model": {name: torch.full_like(tensor, -1) for name, tensor in whole().items()}}
    load(directory / "step-00000001", alone)
    assert all(torch.equal(tensor, whole()[name]) for name, tensor in alone["model"].items())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down, self.norm = nn.Linear(10, 22, bias=False), nn.Linear(22, 10, bias=False), nn.LayerNorm(5)


def fully_sharded(mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel along the last axis of the mesh, and on top of it FSDP2 along the others: uneven, and strided in torch's words."""
    model = Layer()
    for layer, dim in ((model.up, 0), (model.down, 1)):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh["tp"], [Shard(dim)]))
    for parameter in ("weight", "bias"):
        values = getattr(model.norm, parameter).data
        setattr(model.norm, parameter, nn.Parameter(distribute_tensor(values, mesh["tp"], [Replicate()])))
    return fully_shard(model, mesh=mesh["replicate", "shard"] if "replicate" in (mesh.mesh_dim_names or ()) else mesh["shard"])


def reshard_fsdp(directory: str, sizes: tuple[int, ...], write: bool) -> list[str]:
    """Names of the parameters of which this rank does not hold what it should: the tp-th part, and of that the rows of its shard."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp")[-len(sizes):])
    model = fully_sharded(mesh)
    state = {"model": dict(model.state_dict())}
    with Checkpoints(Path(directory), Options(), {}) as checkpoints:
        if write:
            checkpoints.save(1, state, {})
        for tensor in state["model"].values():
            tensor.to_local().zero_()
        checkpoints.load_latest(state)
    wrong = []
    for name, right in Layer().state_dict().items():
        dim = {"up.weight": 0, "down.weight": 1}.get(name)
        part = right if dim is None else right.tensor_split([11], dim)[mesh.get_local_rank("tp")] if sizes[-1] == 2 else right
        parts = part.chunk(sizes[-2])
        shard = mesh.get_local_rank("shard")
        expected = parts[shard] if shard < len(parts) else part[:0]
        if not torch.equal(state["model"][name].to_local(), expected):
            wrong.append(name)
    return wrong


def test_fsdp_over_tensor_parallel(ranks: RankPool, tmp_path: Path) -> None:
    """Rows of the matrices over tp and then over shards, where neither divides the other."""
    layouts = [(3, 2), (2, 2), (2, 2, 2), (4, 2), (3, 1)]
    for number, (before, after) in enumerate(zip(layouts, [*layouts[1:], layouts[0]], strict=True)):
        directory = str(tmp_path / str(number))
        assert ranks.run(reshard_fsdp, prod(before), directory, before, True) == [[]] * prod(before)
        assert ranks.run(reshard_fsdp, prod(after), directory, after, False) == [[]] * prod(after)


def stages(directory: str, halves: int, write: bool) -> list[str]:
    """Pipeline stages: rank r holds the tensors of its part of the layers, all hold a plain count and what rank 0 says of the rate."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = [name for number, name in enumerate(SHAPES) if number * halves // len(SHAPES) == rank * halves // world]
    state: dict[str, Any] = {"model": {name: tensor if write else tensor * 0 - 1 for name, tensor in whole().items() if name in own}}
    state |= {"count": torch.tensor(7 if write else 0), "lr": 0.25 if write else 0.0}
    with Checkpoints(Path(directory), Options(), {}) as checkpoints:
        if write:
            checkpoints.save(1, state, {})
            return own
        checkpoints.load_latest(state)
        more = state["model"] | ({"extra": torch.zeros(1)} if rank == world - 1 else {})
        with pytest.raises(UserError, match=r"model/extra is absent there and \(1,\) float32 here"):
            checkpoints.load(Path(directory) / "step-00000001", {"model": more})
        less = {name: tensor for name, tensor in state["model"].items() if name != "experts"}
        with pytest.raises(UserError, match=r"model/experts is \(5, 3, 4\) float32 there and absent here"):
            checkpoints.load(Path(directory) / "step-00000001", {"model": less})
    assert state["count"] == 7
    assert state["lr"] == 0.25
    assert all(torch.equal(tensor, whole()[name]) for name, tensor in state["model"].items())
    return own


def test_ranks_that_hold_different_tensors_make_one_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    held = ranks.run(stages, 4, str(tmp_path), 2, True)
    assert held[0] == held[1] != held[2] == held[3]
    table = read_table(tmp_path / "step-00000001")
    assert {name.removeprefix("model/") for name in table} == {*SHAPES, "count"}
    assert all(len(record.slices) == 1 for record in table.values()), "equal tensors are written once"
    assert len({chunk.file for record in table.values() for chunk in record.slices}) == 4, "and the ranks share the writing"
    ranks.run(stages, 3, str(tmp_path), 3, False)
    alone = {"model": {name: tensor * 0 - 1 for name, tensor in whole().items()}}
    load(tmp_path / "step-00000001", alone)
    assert all(torch.equal(tensor, whole()[name]) for name, tensor in alone["model"].items())


def test_a_box_that_is_nowhere_is_not_left_as_it_was(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, Options(), {}) as checkpoints:
        checkpoints.save(1, {"model": whole()}, {})
    reader = Reader(tmp_path / "step-00000001")
    reader.table["model/matrix"].slices.clear()
    assert incomplete_tensors(reader.table) == ["model/matrix"]
    with pytest.raises(UserError, match="12 elements of model/matrix were never saved"):
        reader.read_slice("model/matrix", (1, 0), (2, 6))
    assert torch.equal(reader.read_slice("model/experts", (1, 1, 2), (3, 2, 1)), whole()["experts"][1:4, 1:3, 2:3])


def damaged(directory: str) -> None:
    """Both ranks see the damage, although each hashes only its share of the files; a failure of one is everybody's."""
    events: list[str] = []
    place = Path(directory)
    rank = dist.get_rank()
    checkpoints = Checkpoints(place, Options(), {}, report=lambda event, **fields: events.append(event))
    mesh = init_device_mesh("cpu", (2,))

    def state(value: float) -> dict[str, Any]:
        return {"model": {"matrix": distribute_tensor(torch.full((7, 6), value), mesh, [Shard(0)])}}

    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {"step": step})
    checkpoints.wait()
    assert events == (["checkpoint"] * 3 + ["checkpoint_pruned"] if rank == 0 else [])
    dist.barrier()
    if rank == 0:
        (place / "step-00000003/data-00001-00000.bin").write_bytes(b"")
    dist.barrier()
    loaded = state(0)
    assert checkpoints.load_latest(loaded) == {"step": 2}
    assert torch.equal(full(loaded["model"]["matrix"]), torch.full((7, 6), 2.0))
    checkpoints.close()
    again = Checkpoints(place, Options(), {})
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(tensor_files, "_write_file", fail)
        again.save(4, state(4), {})
        with pytest.raises(UserError, match="step 4 was not saved: no such luck"):
            again.wait()
    again.save(5, state(5), {})
    again.close()
    assert again.latest_good() == place / "step-00000005"


def fail(*_: object) -> Any:
    raise OSError(5, "no such luck")


def test_ranks_fail_together(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(damaged, 2, str(tmp_path))
    assert [(row["step"], row["good"]) for row in verify(tmp_path)] == [(2, True), (5, True)]
