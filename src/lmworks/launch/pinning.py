"""Processors of a rank: the ranks of one machine compute on cores of their own, near their GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lmworks import machine

_CPUS, _PCI = Path("/sys/devices/system/cpu"), Path("/sys/bus/pci/devices")


def pin_rank() -> None:
    """Bind all threads of this rank to its part of the processors that the ranks of its machine share.

    Threads and processes that it starts later inherit them. Nothing is changed where the system has no such call, where a launcher such as
    Slurm has already given this rank other processors than the process that started it, or where there are fewer processors than ranks.
    """
    place, here = machine.ranks_here()
    allowed = machine.processors()
    if here == 1 or not allowed or allowed != machine.processors(os.getppid()):
        return
    gpus = torch.cuda.device_count()
    near = [_cpus_near(other % gpus) & allowed or allowed if gpus else allowed for other in range(here)]
    if share := share_of(place, near, allowed, _core):
        machine.pin(share)


def share_of(
    place: int, near: Sequence[frozenset[int]], allowed: frozenset[int], core: Callable[[int], tuple[int, int]]
) -> frozenset[int]:
    """The processors of rank `place` of a machine, disjoint from those of its other ranks; empty if there are not enough.

    `near[i]`: the processors that rank i would best have. Ranks with the same ones share them evenly; if two ranks have different ones
    that overlap, all share `allowed`. `core(cpu)`: (package, core) of a processor; both threads of a core go to one rank if there
    are as many cores as ranks.
    """
    if any(one != other and one & other for one in near for other in near):
        near = [allowed] * len(near)
    together = [other for other, cpus in enumerate(near) if cpus == near[place]]
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(near[place]):
        cores.setdefault(core(cpu), []).append(cpu)
    units = [cores[key] for key in sorted(cores)]
    if len(units) < len(together):
        units = [[cpu] for unit in units for cpu in unit]
    if len(units) < len(together):
        return frozenset()
    first, last = (len(units) * (together.index(place) + step) // len(together) for step in (0, 1))
    return frozenset(cpu for unit in units[first:last] for cpu in unit)


def _core(cpu: int) -> tuple[int, int]:
    """The package and the core of a processor; where the system does not say, each is a core of its own."""
    try:
        package, core = (int((_CPUS / f"cpu{cpu}/topology" / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, cpu
    return package, core


def _cpus_near(device: int) -> frozenset[int]:
    """The processors of the memory node that a GPU is attached to; empty if the system does not say."""
    found: Any = torch.cuda.get_device_properties(device)  # whose stubs omit the address
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        return parse_cpus((_PCI / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """Processors in the notation of Linux, such as 0-3,8-11."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
