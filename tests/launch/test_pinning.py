"""Which processors a rank is bound to, and that a launch does it and passes the variables of the recipe on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lmworks.host import machine
from lmworks.launch import rank_context
from lmworks.launch.launch_dir import LaunchDir
from lmworks.launch.launcher import launch_local, launch_on_hosts
from lmworks.launch.rank_context import parse_cpus, share_of
from lmworks.launch.torchrun import CountRange, Host
from lmworks.recipe.schema.recipe import Recipe
from lmworks.watch.heartbeat import read_local_beats
from patience import PATIENCE
from tiny_run import Tiny


def node(cpu: int) -> tuple[int, int]:
    """Two packages with eight cores each, of two threads: 0-7 and 16-23 are the first."""
    return cpu % 16 // 8, cpu % 8


ALL = frozenset(range(32))
FIRST, SECOND = (frozenset(cpu for cpu in ALL if node(cpu)[0] == package) for package in (0, 1))


@pytest.mark.parametrize("near", [[ALL] * 8, [FIRST] * 4 + [SECOND] * 4, [SECOND, FIRST] * 4, [FIRST] * 3 + [SECOND], [FIRST] * 7 + [ALL]])
def test_ranks_get_cores_of_their_own(near: list[frozenset[int]]) -> None:
    shares = [share_of(place, near, ALL, node) for place in range(len(near))]
    taken = [cpu for share in shares for cpu in share]
    assert all(shares) and len(taken) == len(set(taken))
    threads = [{node(cpu) for cpu in share} for share in shares]
    assert not any(one & other for place, one in enumerate(threads) for other in threads[:place]), "a core is not divided"
    if ALL not in near:
        assert all(share <= wish for share, wish in zip(shares, near, strict=True)), "near its GPU"


def test_with_more_ranks_than_cores_threads_are_divided_and_with_more_than_those_nothing() -> None:
    assert sorted(cpu for place in range(20) for cpu in share_of(place, [ALL] * 20, ALL, node)) == sorted(ALL)
    assert share_of(0, [ALL] * 33, ALL, node) == frozenset()


def test_the_notation_of_linux() -> None:
    assert parse_cpus("0-3,8,10-11\n") == frozenset({0, 1, 2, 3, 8, 10, 11}) and parse_cpus("\n") == frozenset()


def test_processors_that_a_launcher_has_bound_a_rank_to_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    bound: list[object] = []
    monkeypatch.setattr(machine, "pin", bound.append)
    own = {0: frozenset(range(4)), os.getppid(): frozenset(range(8))}
    monkeypatch.setattr(machine, "processors", lambda process=0: own[process])
    rank_context.pin_rank()
    assert bound == []
    own[os.getppid()] = own[0]
    rank_context.pin_rank()
    assert len(bound) == 1


HOSTS = [Host("localhost", 2), Host("other", 1), Host("127.0.0.1", 3)]


@pytest.mark.parametrize(("ranks", "hosts", "expected"), [
    ("2:4", None, [(0, 4), (1, 4), (2, 4), (3, 4)]),
    ("3", None, [(0, 3)]),
    ("", HOSTS, [(0, 5), (0, 1), (2, 5)]),
])  # fmt: skip
def test_agents_of_one_machine_share_it(
    ranks: str, hosts: list[Host] | None, expected: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each agent's first rank knows its place among all of the machine, by which it takes processors, threads and a GPU."""
    recipe = Recipe.model_validate({"name": "shared"})
    if hosts is None:
        launch = launch_local(recipe, tmp_path, CountRange.parse(ranks), [])
    else:
        launch = launch_on_hosts(recipe, tmp_path, hosts, None, [], None)
    pinned: list[frozenset[int]] = []
    monkeypatch.setattr(machine, "pin", pinned.append)
    monkeypatch.setattr(machine, "processors", lambda process=0: frozenset(range(12)))
    monkeypatch.setattr(rank_context, "_core", node)
    monkeypatch.setenv("LOCAL_RANK", "0")
    for host, (place, together) in zip(launch.hosts, expected, strict=True):
        monkeypatch.delenv(machine.RANKS_HERE, raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(host.slots))
        for name, value in launch.agent(host, 1).environment(host.name).items():
            monkeypatch.setenv(name, value)
        assert machine.ranks_here() == (place, together)
        pinned.clear()
        rank_context.pin_rank()
        everything = frozenset(range(12))
        assert pinned == ([share_of(place, [everything] * together, everything, node)] if together > 1 else [])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["2", "1:2"])  # of one agent, and of two
def test_a_launch_gives_its_ranks_processors_and_the_variables_of_the_recipe(ranks: str, tiny: Tiny, tmp_path: Path) -> None:
    run = tiny.copy(tmp_path / "run")
    options = (f"run_dir={run.run_dir}", "stability.spike=null", "launch.environment.NCCL_SOCKET_IFNAME=ib7", "time=null")
    words = [word for option in options for word in ("--set", option)]
    command = [sys.executable, "-m", "lmworks.cli.main", "launch", "local", str(run.recipe), "--ranks", ranks, "--to", "pretrain", *words]
    launched = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    folder, deadline = LaunchDir.of(run.run_dir), time.monotonic() + PATIENCE
    while len(beats := read_local_beats(folder.heartbeats)) < 2:
        assert launched.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    processes = [psutil.Process(beat.pid) for beat in beats]
    variables = [one.environ().get("NCCL_SOCKET_IFNAME") for one in processes]
    cpus = [set(one.cpu_affinity()) for one in processes]
    folder.request_stop(signal.SIGTERM)
    launched.wait(PATIENCE)
    assert variables == ["ib7", "ib7"]
    allowed = os.sched_getaffinity(0)
    assert (not cpus[0] & cpus[1] and cpus[0] | cpus[1] == allowed) if len(allowed) > 1 else cpus == [allowed, allowed]
