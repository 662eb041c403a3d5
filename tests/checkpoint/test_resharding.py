"""Two ranks save shards; one process, and two ranks in another layout, load the same tensors."""

from __future__ import annotations

import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from lmworks.checkpoint import Checkpoints, load, verify
from lmworks.recipe.training import Checkpoints as Options


def whole() -> dict[str, torch.Tensor]:
    return {"matrix": torch.arange(7 * 6.0).reshape(7, 6), "experts": torch.arange(4 * 3 * 2.0).reshape(4, 3, 2), "norm": torch.ones(5)}


def sharded(axis: int, blank: bool) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    tensors = {name: torch.zeros_like(tensor) if blank else tensor for name, tensor in whole().items()}
    return {name: distribute_tensor(tensor, mesh, [Shard(axis)]) if tensor.dim() > axis + 1 else tensor for name, tensor in tensors.items()}


def rank_main(rank: int, port: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    events: list[str] = []
    checkpoints = Checkpoints(Path(directory), Options(keep_last=2), {"model": "a"}, report=lambda event, **fields: events.append(event))
    for step in (1, 2, 3):
        state = {"model": sharded(0, blank=False), "lr": step / 3}
        checkpoints.save(step, state, {"step": step})
        for tensor in state["model"].values():
            tensor.mul_(-1)
    checkpoints.wait()
    assert events == (["checkpoint"] * 3 + ["checkpoint_pruned"] if rank == 0 else [])
    dist.barrier()
    if rank == 0:
        # Both ranks must see the damage, although each hashes only its share of the files.
        (Path(directory) / "step-00000003/data-00001-00000.bin").write_bytes(b"")
    dist.barrier()
    loaded = {"model": sharded(1, blank=True), "lr": 0.0}
    assert checkpoints.load_latest(loaded) == {"step": 2}
    assert loaded["lr"] == 2 / 3
    for name, tensor in loaded["model"].items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(full, whole()[name]), name
    checkpoints.close()
    dist.destroy_process_group()


def test_a_checkpoint_of_two_ranks_loads_on_one_and_on_another_layout(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(rank_main, args=(port, str(tmp_path)), nprocs=2)
    assert [(row["step"], row["good"]) for row in verify(tmp_path)] == [(2, True)]
    names = {path.name for path in (tmp_path / "step-00000002").iterdir()}
    assert {"data-00000-00000.bin", "data-00001-00000.bin"} <= names
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in whole().items()}}
    load(tmp_path / "step-00000002", state)
    assert all(torch.equal(tensor, whole()[name]) for name, tensor in state["model"].items())
