"""Counters of the kernel: read from recorded files of both versions of control groups, and from this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lmworks.host import counters, machine
from lmworks.host.counters import Counters, process_identity, read_counters

SECOND = "some avg10=1.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """The files of the control group are looked for once a process."""
    counters._files.cache_clear()
    yield
    counters._files.cache_clear()


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /sys/fs/cgroup, for a process that is in the group /job/step of every controller."""
    (tmp_path / "membership").write_text("4:memory:/job/step\n2:cpu,cpuacct:/job/step\n0::/job/step\n")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path / "cgroup"


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_version_2(groups: Path) -> None:
    """The pressure and the kills of the own group; the throttling of all above it too, since each may have a quota."""
    put(groups / "job/step", cpu__stat="usage_usec 9\nnr_throttled 4\nthrottled_usec 1500000\n", memory__events="oom 3\noom_kill 2\n",
        cpu__pressure=SECOND.format(2_500_000), memory__pressure=SECOND.format(500_000), io__pressure=SECOND.format(0))  # fmt: skip
    put(groups / "job", cpu__stat="throttled_usec 250000\n", memory__events="oom_kill 11\n", cpu__pressure=SECOND.format(9_000_000))
    found = read_counters()
    assert (found.cpu_pressure, found.memory_pressure, found.io_pressure) == (2.5, 0.5, 0.0)
    assert (found.throttled, found.oom_kills) == (1.75, 2.0)


def test_version_1(groups: Path) -> None:
    """The controller cpu is mounted under its own name, times are in nanoseconds; there is no pressure of a group."""
    put(groups / "cpu/job/step", cpu__stat="nr_periods 5\nnr_throttled 4\nthrottled_time 3000000000\n")
    put(groups / "memory/job/step", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    found = read_counters()
    assert (found.throttled, found.oom_kills) == (3.0, 1.0)


def test_what_a_kernel_does_not_count_is_none(groups: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_PROC", tmp_path / "no proc")
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    put(groups / "job/step", cpu__pressure="some avg10=1.00 total=\n", memory__events="garbage\noom_kill many\n")
    found = read_counters()
    assert [found.cpu_pressure, found.memory_pressure, found.throttled, found.oom_kills, found.disk_read] == [None] * 5
    assert "oom_kills" not in process_identity() and counters.runnable_tasks() >= 0


def test_differences_leave_out_what_one_reading_lacks() -> None:
    before = Counters(10.0, cpu_pressure=1.0, network=500.0, oom_kills=None, disk_read=9.0)
    now = Counters(14.0, cpu_pressure=3.0, network=None, oom_kills=1.0, disk_read=2.0)
    assert now.since(before) == {"time": 4.0, "cpu_pressure": 2.0, "disk_read": 0.0}


def test_a_process_that_burns_the_processors_is_seen() -> None:
    """Twice as many busy processes as CPUs: tasks wait, and more of them can run than there are CPUs."""
    if read_counters().cpu_pressure is None:
        pytest.skip("this kernel has no pressure stall information")
    cores = os.cpu_count() or 1
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores)]
    try:
        time.sleep(0.2)
        before, loads = read_counters(), []
        for _ in range(10):
            time.sleep(0.1)
            loads.append(counters.runnable_tasks())
        since = read_counters().since(before)
    finally:
        for one in burning:
            one.kill()
            one.wait()
    assert since["cpu_pressure"] > 0.5 * since["time"]
    assert sorted(loads)[5] > 1.5


def test_transfers_leave_out_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    card = psutil.net_io_counters()._replace
    monkeypatch.setattr(
        psutil, "net_io_counters", lambda pernic: {
            "lo": card(bytes_sent=1000, bytes_recv=1000), "eth0": card(bytes_sent=3, bytes_recv=4),
            "ib0": card(bytes_sent=0, bytes_recv=10),
        },
    )  # fmt: skip
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: SimpleNamespace(read_bytes=5, write_bytes=6))
    found = read_counters()
    assert (found.network, found.disk_read, found.disk_written) == (17.0, 5.0, 6.0)


def test_the_identity_of_a_process() -> None:
    found, again = process_identity(), process_identity()
    assert found == again and found["pid"] == os.getpid()
    assert abs(found["process_started"] - psutil.Process().create_time()) < 0.1
