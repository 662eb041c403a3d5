"""What is asked of the machine, and what may be said in its stead."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import psutil
import pytest
import torch

from lmworks.checkpoint import manifest
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.untrusted import sandbox
from patience import PATIENCE

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(machine.VARIABLE)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups, in place of the kernel's."""
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")


def test_what_is_said_is_the_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "bf16=no, cores=3,peak=3e12,memory=64e9,available=16e9,disk=1000,filesystem=nfs4,sandbox=no,bf16=yes,"
    monkeypatch.setenv(machine.VARIABLE, said)
    assert machine.multiplies_bf16(CPU) is True, "the last word counts"
    assert (machine.cores(), machine.memory(), machine.available_memory()) == (3, 64_000_000_000, 16_000_000_000)
    assert (machine.free_disk(tmp_path), machine.file_system(tmp_path), machine.sandbox()) == (1000, "nfs4", False)
    assert machine.override_or("peak", lambda: 1.0) == 3e12


def test_where_nothing_is_said_the_machine_answers(group: Path, tmp_path: Path) -> None:
    assert machine.overrides() == {}
    assert machine.cores() == len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert machine.memory() == psutil.virtual_memory().total > machine.available_memory() > 0
    assert 0 < machine.free_disk(tmp_path) <= shutil.disk_usage(tmp_path).total
    assert machine.file_system(tmp_path) in {one.fstype for one in psutil.disk_partitions(all=True)}


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("bf17=yes", r"LMWORKS_MACHINE: 'bf17' is not known; it takes NAME=VALUE,... with bf16, cores, .*sandbox, recorded$"),
        ("cores", r"LMWORKS_MACHINE: 'cores' is not valid; cores is a whole number from 1$"),
        ("cores=0", r"'cores=0' is not valid"),
        ("cores=2,cores=1.5", r"'cores=1.5' is not valid"),
        ("bf16=true", r"'bf16=true' is not valid; bf16 is yes or no$"),
        ("memory=64GB", r"'memory=64GB' is not valid; memory is a number of bytes, such as 64e9$"),
        ("memory=-1", r"'memory=-1' is not valid"),
        ("disk=inf", r"'disk=inf' is not valid"),
        ("disk=nan", r"'disk=nan' is not valid"),
        ("peak=0", r"'peak=0' is not valid"),
        ("filesystem=", r"'filesystem=' is not valid"),
    ],
)
def test_what_cannot_be_is_one_line(monkeypatch: pytest.MonkeyPatch, said: str, error: str) -> None:
    monkeypatch.setenv(machine.VARIABLE, said)
    with pytest.raises(UserError, match=error):
        machine.overrides()


# A container's share


@pytest.mark.parametrize(("quota", "cores"), [("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("max 100000", 64)])
def test_a_cpu_quota_counts(group: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64), raising=False)
    write(group, membership="0::/pods/mine\n")
    write(group / "pods" / "mine", cpu__max=f"{quota}\n")
    assert machine.cores() == cores


def test_the_least_quota_of_all_groups_above_counts_and_never_more_than_the_cores(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    write(group, membership="0::/pods/mine\n")
    write(group / "pods" / "mine", cpu__max="400000 100000\n")
    write(group / "pods", cpu__max="300000 100000\n")
    assert machine.cores() == 3
    write(group / "pods", cpu__max="9900000 100000\n")
    write(group / "pods" / "mine", cpu__max="max 100000\n")
    assert machine.cores() == 8


def test_version_1_and_a_container_that_sees_the_path_on_its_host(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    write(group, membership="5:memory:/docker/1f\n4:cpu,cpuacct:/docker/1f\n1:name=systemd:/docker/1f\n0::/docker/1f\n")
    write(group / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert machine.cores() == 8
    write(group / "cpu", cpu__cfs_quota_us="50000\n")
    assert machine.cores() == 1
    write(group / "memory", memory__limit_in_bytes="1000000\n", memory__usage_in_bytes="700000\n")
    write(group / "memory", memory__stat="inactive_file 0\ntotal_inactive_file 200000\n")
    assert (machine.memory(), machine.available_memory()) == (1_000_000, 500_000)


def test_a_memory_limit_counts_and_cached_files_do_not(group: Path) -> None:
    write(group, membership="0::/\n")
    assert machine.memory() == psutil.virtual_memory().total
    write(group, memory__max="max\n", memory__current="800000\n")
    assert machine.memory() == psutil.virtual_memory().total
    write(group, memory__max="1000000\n", memory__stat="anon 600000\ninactive_file 150000\n")
    assert (machine.memory(), machine.available_memory()) == (1_000_000, 350_000)
    write(group, memory__current="2000000\n")
    assert machine.available_memory() == 0


# What goes by it


def test_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item waits until as many threads as there are cores have one, so fewer would wait for ever and more would be seen."""
    for cores in (1, 3):
        monkeypatch.setenv(machine.VARIABLE, f"cores={cores}")
        together, seen = threading.Barrier(cores), set()

        def work(item: int, together: threading.Barrier = together, seen: set[int] = seen) -> None:
            seen.add(threading.get_ident())
            together.wait(PATIENCE)

        manifest.parallel(work, range(6))
        assert len(seen) == cores


def test_nothing_is_run_where_there_is_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.VARIABLE, "sandbox=no")
    assert sandbox.run_python("pass").outcome == "refused"
