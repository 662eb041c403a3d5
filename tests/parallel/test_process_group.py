"""A layout on other numbers of ranks, and processes that become ranks."""

from __future__ import annotations

import os
import re
import socket
import time
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from lmworks.errors import UserError
from lmworks.parallel.process_group import init_ranks, layout_for
from lmworks.recipe.schema.layout import Layout, world_size
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


def _wait_in_vain(rank: int, port: int, told: Connection) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
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
