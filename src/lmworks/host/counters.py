"""Counters of the machine and of the control group (container) of this process: pressure, throttling, kills, network, disks.

All rise from the boot or from the beginning of the group, so a rate is the difference of two readings over the time between them. A
counter that the kernel, the container or the operating system does not offer is None.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from lmworks.host.machine import all_cores, control_groups, lines_of

_PROC = Path("/proc")
PRESSURES = ("cpu", "memory", "io")


@dataclass(frozen=True)
class Counters:
    """One reading. Times are in seconds, transfers in bytes.

    *_pressure: time in which some task waited for the resource (pressure stall information). throttled: time in which the quota of a group
    of this process withheld the CPU, summed over CPUs. oom_kills: processes of the group that the kernel killed for want of memory.
    network: sent and received by all interfaces but the loopback.
    """

    time: float
    cpu_pressure: float | None = None
    memory_pressure: float | None = None
    io_pressure: float | None = None
    throttled: float | None = None
    oom_kills: float | None = None
    network: float | None = None
    disk_read: float | None = None
    disk_written: float | None = None

    def since(self, before: Counters) -> dict[str, float]:
        """What was counted since an earlier reading, by name; without counters that one of the two lacks. A counter that began again, as
        after a device was removed, has counted nothing."""
        pairs = ((one.name, getattr(before, one.name), getattr(self, one.name)) for one in fields(self))
        return {name: max(0.0, now - then) for name, then, now in pairs if then is not None and now is not None}


def read_counters() -> Counters:
    """All counters now: a dozen small files of the kernel, 0.3 ms."""
    found = {f"{name}_pressure": _pressure(name) for name in PRESSURES}
    return Counters(time.monotonic(), **found, throttled=_throttled(), oom_kills=oom_kills(), network=_network(), **_disks())


def oom_kills() -> float | None:
    """Processes of the control group of this process, or of the machine where it has none, that the kernel killed for want of memory."""
    for file in _files("memory", "memory.events", "memory.oom_control"):
        if (found := _field(file, "oom_kill")) is not None:
            return found
    return _field(_PROC / "vmstat", "oom_kill")


def process_identity() -> dict[str, Any]:
    """What tells this process from all others, also for a reader after its end: `pid`, `host`, `boot` (id of the machine's boot),
    `process_started` (seconds since 1970), and `oom_kills` of its control group so far. A value that the system does not tell is absent."""
    import psutil

    boot = "".join(lines_of(_PROC / "sys/kernel/random/boot_id")).strip()
    known = {
        "pid": os.getpid(), "host": socket.gethostname(), "boot": boot or None,
        "process_started": round(psutil.Process().create_time(), 2), "oom_kills": oom_kills(),
    }  # fmt: skip
    return {name: value for name, value in known.items() if value is not None}


def runnable_tasks() -> float:
    """Tasks of the machine that run or wait for a CPU now, per CPU; where the kernel does not say, the mean of the last minute."""
    figures = " ".join(lines_of(_PROC / "loadavg")).split()
    with suppress(IndexError, ValueError):
        return int(figures[3].partition("/")[0]) / all_cores()
    return os.getloadavg()[0] / all_cores()


@cache
def _files(controller: str, *names: str) -> tuple[Path, ...]:
    """The files of these names in the groups of this process, from its own to the root."""
    return tuple(file for folder in control_groups(controller) for name in names if (file := folder / name).is_file())


def _pressure(resource: str) -> float | None:
    """Of the group of this process, which is the container's, or of the machine: the line `some ... total=MICROSECONDS`."""
    for file in (*_files("", f"{resource}.pressure")[:1], _PROC / "pressure" / resource):
        for line in lines_of(file):
            kind, _, rest = line.partition(" ")
            with suppress(ValueError):
                if kind == "some":
                    return int(rest.partition("total=")[2]) / 1e6
    return None


def _throttled() -> float | None:
    found = [value for file in _files("cpu", "cpu.stat") for value in _throttled_in(file)]
    return sum(found) if found else None


def _throttled_in(file: Path) -> Iterator[float]:
    for name, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):  # of version 2, of version 1
        if (value := _field(file, name)) is not None:
            yield value * unit


def _field(file: Path, name: str) -> float | None:
    """The number behind a name in a file of lines `NAME NUMBER`."""
    for line in lines_of(file):
        key, _, value = line.partition(" ")
        if key == name:
            with suppress(ValueError):
                return float(int(value))
    return None


def _network() -> float | None:
    import psutil

    try:
        cards = psutil.net_io_counters(pernic=True)
    except (OSError, RuntimeError, ValueError):
        return None
    return float(sum(card.bytes_sent + card.bytes_recv for name, card in cards.items() if not name.startswith("lo")))


def _disks() -> dict[str, float | None]:
    import psutil

    try:
        found = psutil.disk_io_counters()
    except (OSError, RuntimeError, ValueError, NotImplementedError):
        found = None
    if found is None:
        return {"disk_read": None, "disk_written": None}
    return {"disk_read": float(found.read_bytes), "disk_written": float(found.write_bytes)}
