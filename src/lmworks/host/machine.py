"""Properties of this machine, in one place, and overrides of them.

`LMWORKS_MACHINE="bf16=no,cores=1"` overrides properties for a process and its children: to plan for another machine, to use a part of this
one, or to test the behavior on other machines.

The C library's memory allocator, for training on CPUs.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmworks.errors import UserError

if TYPE_CHECKING:
    import torch


VARIABLE = "LMWORKS_MACHINE"
_PAGES = Path("/proc/self/statm")
RANKS_HERE = "LMWORKS_RANKS_HERE"  # ranks of this machine in agents before this one, and in all: "2/4"
T = TypeVar("T")


def _boolean(text: str) -> bool:
    return {"yes": True, "no": False}[text]


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise ValueError
    return value


def _bytes(text: str) -> int:
    if (value := int(float(text))) < 0:
        raise ValueError
    return value


def _name(text: str) -> str:
    if not text:
        raise ValueError
    return text


_OVERRIDES: dict[str, tuple[Callable[[str], Any], str]] = {
    "bf16": (_boolean, "yes or no"),
    "cores": (_count, "a whole number from 1"),
    "peak": (_positive, "FLOP/s of matrix multiplications, such as 3e12"),
    "speed": (_positive, "FLOP/s of training, such as 1e12"),
    "memory": (_bytes, "a number of bytes, such as 64e9"),
    "available": (_bytes, "a number of bytes, such as 16e9"),
    "disk": (_bytes, "a number of bytes, such as 500e9"),
    "filesystem": (_name, "a name such as ext4 or nfs4"),
    "sandbox": (_boolean, "yes or no"),
    "recorded": (_name, "a folder with recorded files of a machine"),
}


def overrides() -> dict[str, Any]:
    """The values set by `LMWORKS_MACHINE`. Raises `UserError`."""
    found: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        name, _, value = pair.partition("=")
        if name not in _OVERRIDES:
            raise UserError(f"{VARIABLE}: {name!r} is not known; it takes NAME=VALUE,... with {', '.join(_OVERRIDES)}")
        read, form = _OVERRIDES[name]
        try:
            found[name] = read(value)
        except (ValueError, KeyError, OverflowError):
            raise UserError(f"{VARIABLE}: {pair!r} is not valid; {name} is {form}") from None
    return found


def override_or(name: str, measure: Callable[[], T]) -> T:
    """The value that `LMWORKS_MACHINE` sets, otherwise the result of `measure`."""
    given = overrides()
    return given[name] if name in given else measure()


def cores() -> int:
    """CPU cores that this process may use: its CPU affinity (that of before `pin`), or the CPU quota of its container if that is less."""

    def measure() -> int:
        return min([_unpinned or len(processors()) or os.cpu_count() or 1, *_cpu_quotas()])

    return override_or("cores", measure)


def processors(process: int = 0) -> frozenset[int]:
    """The processors that a process (0: this one) is bound to; empty where the system does not say."""
    try:
        return frozenset(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else frozenset()
    except OSError:
        return frozenset()


def all_cores() -> int:
    """CPU cores of the machine, whoever may use them."""
    return os.cpu_count() or 1


_unpinned = 0  # processors that this process might use before `pin`


def pin(cpus: Iterable[int]) -> None:
    """Bind all threads of this process to these processors. `cores` goes on counting those that its launch has, of which each rank takes a
    part."""
    global _unpinned
    _unpinned = _unpinned or len(processors())
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cpus)


def ranks_here() -> tuple[int, int]:
    """The place of this process among the ranks of its machine, from 0, and how many they are. torchrun counts those of one agent; where
    several agents run on one machine, our launcher sets `RANKS_HERE`."""
    place, count = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if RANKS_HERE not in os.environ:
        return place, count
    before, together = os.environ[RANKS_HERE].split("/")
    return int(before) + place, int(together)


def threads() -> int:
    """CPU threads to compute with: OMP_NUM_THREADS if it is less than the cores, unless `LMWORKS_MACHINE` sets cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(cores(), int(asked)) if asked.isdecimal() and int(asked) and "cores" not in overrides() else cores()


def memory() -> int:
    """Bytes of memory that this process may use: those of the machine, or the limit of its container if that is less."""

    def measure() -> int:
        import psutil

        return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _memory_limits())])

    return override_or("memory", measure)


def available_memory() -> int:
    """Bytes of memory that are available now without swapping."""

    def measure() -> int:
        import psutil

        return min([int(psutil.virtual_memory().available), *(left for _, left in _memory_limits())])

    return override_or("available", measure)


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory: you tried to allocate", "out of memory", "std::bad_alloc", "alloc_failed",
                  "failed to map segment", "cannot allocate memory")  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out: of a GPU, of this process (`ulimit -v`), or of the machine."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (RuntimeError, ImportError)) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def require_memory(needed: float, what: str, remedy: str) -> None:
    """Raise `UserError` if fewer than `needed` bytes of memory are available. `what` needs them, and `remedy` says what to do."""
    if needed > (available := available_memory()):
        raise UserError(f"{what} needs {needed / 2**30:,.2f} GiB of memory, and {available / 2**30:,.2f} GiB are available; {remedy}")


def resident_memory() -> int:
    """Bytes that are resident in this process now."""
    with suppress(OSError, IndexError):
        return int(_PAGES.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.Process(os.getpid()).memory_info().rss)


def is_running(process: int) -> bool:
    """Whether there is a process with this id."""
    import psutil

    return psutil.pid_exists(process)


def free_disk(path: Path) -> int:
    """Bytes that can be written to the file system of a path."""
    return override_or("disk", lambda: shutil.disk_usage(path).free)


def inodes(path: Path) -> tuple[int, int]:
    """Free and all inodes of the file system of a path; 0 of 0 where it has no fixed number."""
    found = os.statvfs(path)
    return found.f_favail, found.f_files


def disk_size(path: Path) -> int:
    """Bytes of the file system of a path."""
    return shutil.disk_usage(path).total


def recorded() -> Path | None:
    """The folder from which `lmworks health` reads the files of a machine; None for this machine."""
    given: str | None = override_or("recorded", lambda: None)
    return Path(given).absolute() if given else None


def file_system(path: Path) -> str:
    """The kind of file system that holds a path, such as ext4 or nfs4."""

    def measure() -> str:
        import psutil

        whole = path.resolve()
        mounts = [one for one in psutil.disk_partitions(all=True) if whole.is_relative_to(one.mountpoint)]
        return max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else "an unknown file system"

    return override_or("filesystem", measure)


def sandbox() -> bool:
    """Whether to try to sandbox untrusted programs. The required kernel features are checked when one is started."""
    return override_or("sandbox", lambda: sys.platform == "linux")


def speed() -> float | None:
    """FLOP/s of training if overridden; otherwise None, and the speed is measured on the recipe's own step."""
    return override_or("speed", lambda: None)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bf16 matrices in hardware. `LMWORKS_MACHINE` applies to CPUs only."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    able = torch.cpu.get_capabilities()
    names = ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16", "sve_bf16")
    return override_or("bf16", lambda: any(able.get(name, False) for name in names))


_CGROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # see cgroups(7)


def control_groups(controller: str) -> Iterator[Path]:
    """Folders that may limit this process: its control group and the groups above it, under version 1 or 2.

    A container may see the host path of its group, which does not exist inside, and its own group as the root.
    """
    for line in lines_of(_MEMBERSHIP):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        own = root / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _cpu_quotas() -> Iterator[int]:
    """CPU quota of each group, in cores, rounded up."""
    for folder in control_groups("cpu"):
        figures = " ".join(lines_of(folder / "cpu.max") or lines_of(folder / "cpu.cfs_quota_us") + lines_of(folder / "cpu.cfs_period_us"))
        quota, _, period = figures.partition(" ")
        if quota not in ("", "max", "-1"):
            yield math.ceil(int(quota) / int(period))


def _memory_limits() -> Iterator[tuple[int, int]]:
    """The limit of each group that has one, and the memory left. Page cache that the kernel can reclaim does not count as used."""
    for folder in control_groups("memory"):
        limit = " ".join(lines_of(folder / "memory.max") or lines_of(folder / "memory.limit_in_bytes"))
        used = " ".join(lines_of(folder / "memory.current") or lines_of(folder / "memory.usage_in_bytes"))
        if limit not in ("", "max") and used:
            statistics = dict(line.split() for line in lines_of(folder / "memory.stat"))
            cached = statistics.get("total_inactive_file", statistics.get("inactive_file", "0"))
            yield int(limit), max(0, int(limit) - int(used) + int(cached))


def lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


# From malloc.h of glibc. Both are an int; larger requests are mapped anew each time.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Let this process keep freed memory, if the C library is glibc; returns whether that was possible.

    A training step frees hundreds of tensors and allocates similar ones in the next step. glibc returns large ones to the kernel, which
    clears every page again: a tenth of a step (LOG.md). The process stays as large as its largest step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(_MMAP_THRESHOLD, _LARGEST), mallopt(_TRIM_THRESHOLD, _LARGEST)])


def return_freed_memory() -> None:
    """Give memory that this process has freed and kept back to the kernel, if the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
