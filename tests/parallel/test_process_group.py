"""A layout on other numbers of ranks, and processes that become ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.parallel import process_group
from lmworks.parallel.process_group import init_ranks
from lmworks.recipe.schema.layout import Layout, layout_for, world_size
from patience import PATIENCE
from rank_pool import FORKS


@pytest.mark.parametrize(
    ("layout", "world", "axis", "size"),
    [
        ({}, 3, "dp_shard", 3),
        ({"dp_shard": 4}, 3, "dp_shard", 3),
        ({"dp_shard": 4, "tp": 2}, 6, "dp_shard", 3),
        ({"pp": 2, "cp": 2, "dp_shard": 2}, 4, "dp_shard", 1),
        ({"dp_shard": 4, "ep": 2}, 6, "dp_shard", 6),
        ({"dp_shard": 2, "cp": 4, "ep": 2}, 12, "dp_shard", 3),
        ({"dp_replicate": 4, "dp_shard": 2}, 6, "dp_replicate", 3),
    ],
)
def test_the_data_axis_takes_what_is_there(layout: dict[str, int], world: int, axis: str, size: int) -> None:
    found = layout_for(Layout(**layout), world)
    assert world_size(found) == world
    assert found == Layout(**layout | {axis: size})


@pytest.mark.parametrize(
    ("layout", "world", "legal"),
    [
        ({"tp": 2}, 3, "2 or 4"),
        ({"pp": 2, "tp": 2}, 3, "4"),
        ({"dp_shard": 4, "ep": 4}, 6, "4 or 8"),
        ({"dp_shard": 2, "dp_replicate": 2}, 3, "2 or 4"),
    ],
)
def test_ranks_that_do_not_divide_are_refused_with_numbers_that_do(layout: dict[str, int], world: int, legal: str) -> None:
    with pytest.raises(UserError, match=rf"^{world} ranks are not a multiple of .*; start {legal} ranks$") as refused:
        layout_for(Layout(**layout), world)
    for size in map(int, re.findall(r"\d+", str(refused.value).rpartition("start")[2])):
        assert world_size(layout_for(Layout(**layout), size)) == size


def test_a_process_that_nobody_launched_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert not init_ranks(Layout(), 10, threads=1).distributed
    with pytest.raises(UserError, match="lmworks launch local"):
        init_ranks(Layout(dp_shard=2), 10, threads=1)


def test_every_group_of_the_mesh_gives_up_after_the_same_time() -> None:
    """Three ranks stay away from collectives of the mesh's groups; rank 0 waits a second for them, not torch's half an hour."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here, there = FORKS.Pipe()
    processes = [FORKS.Process(target=_wait_in_vain, args=(rank, port, there), daemon=True) for rank in range(4)]
    try:
        for process in processes:
            process.start()
        assert here.poll(PATIENCE)
        waited = here.recv()
    finally:
        for process in processes:
            process.kill()
    assert waited.keys() == {"tp", "dp", "all"}
    assert all(0.9 < seconds < 600 for seconds in waited.values()), waited


def test_many_ranks_open_few_sockets() -> None:
    """Beyond a number of ranks, pairs of ranks connect only when they speak to each other."""
    opened = {}
    for meshed in (128, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        here, there = FORKS.Pipe()
        processes = [FORKS.Process(target=_count_sockets, args=(rank, port, meshed, there), daemon=True) for rank in range(14)]
        try:
            for process in processes:
                process.start()
            assert here.poll(PATIENCE)
            opened[meshed] = here.recv()
        finally:
            for process in processes:
                process.kill()
    assert opened[2] <= opened[128] - 4, opened  # sockets of rank 3, after collectives in two groups of 14


def _as_rank(rank: int, world: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def _count_sockets(rank: int, port: int, meshed: int, told: Connection) -> None:
    _as_rank(rank, 14, port)
    process_group._MESHED = meshed
    ranks = init_ranks(Layout(), 60)
    ranks.all_reduce_max(1.0)
    ranks.broadcast(1) if ranks.is_first else ranks.receive_broadcast()
    if rank == 3:
        files = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        told.send(sum(file.is_socket() for file in files if file.exists()))
    dist.barrier()
    time.sleep(PATIENCE)


def _wait_in_vain(rank: int, port: int, told: Connection) -> None:
    _as_rank(rank, 4, port)
    ranks = init_ranks(Layout(tp=2), 1)
    assert ranks.size("dp") == 2, "dp_shard has taken the ranks that tp has left"
    if dist.get_rank():
        time.sleep(PATIENCE)
    waited = {}
    for name, group in [("tp", ranks.group("tp")), ("dp", ranks.group("dp")), ("all", dist.group.WORLD)]:
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError:
            waited[name] = time.monotonic() - began
    told.send(waited)


@pytest.mark.parametrize(("visible", "index"), [(8, 3), (1, 0), (2, 1)])
def test_a_rank_takes_a_gpu_that_it_sees(visible: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the machine's, its own alone, or one that several ranks share."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for place in ({"LOCAL_RANK": "3"}, {"LOCAL_RANK": "1", machine.RANKS_HERE: "2/4"}):  # of one agent, and of the second of two
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        assert process_group._device() == torch.device("cuda", index) and taken.pop() == torch.device("cuda", index)


def test_memory_of_gpus_is_in_segments_that_grow_unless_the_user_says_how() -> None:
    code = "import lmworks, os; print(os.environ.get('PYTORCH_ALLOC_CONF'))"
    for given, expected in (({}, "expandable_segments:True"), ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "None"),
                            ({"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"}, "garbage_collection_threshold:0.8")):  # fmt: skip
        plain = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
        done = subprocess.run([sys.executable, "-c", code], env=plain | given, capture_output=True, encoding="utf-8", check=True)
        assert done.stdout.strip() == expected
