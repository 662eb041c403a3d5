"""Checks of disks: mounts that hang or are read-only, free space and inodes, and a write test whose bytes are read back."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from lmworks.health.node import Node, NotThere
from lmworks.health.report import Result
from lmworks.host import machine
from lmworks.io.files import temporary_folder

_NETWORKED = ("nfs", "lustre", "wekafs", "ceph", "beegfs", "gpfs", "cifs", "smb", "9p", "fuse.", "afs", "glusterfs")
_DISKS = ("ext", "xfs", "btrfs", "zfs", "f2fs")
_ANSWER = 5.0  # seconds for a mount to answer
_LITTLE, _FEW = 1 << 30, 1000  # bytes, inodes
_BLOCK = 4 << 20
_SLOW, _SLOWEST = 50e6, 5e6  # bytes per second with fsync
_STALL = 2.0  # seconds for one block
_ADVICE = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "delete files there, or choose another run_dir")
_SKEW = 5.0  # seconds between this clock and that of the file system


def mounts(node: Node, folder: Path, answers: Callable[[str], object] = lambda point: machine.inodes(Path(point))) -> Result:
    """Read-only mounts, and mounted servers that do not answer. `answers` asks a mount; it is called in a process that can be left behind,
    because a call on a dead mount does not return."""
    text = node.read("/proc/self/mounts")
    if text is None:
        raise NotThere("there is no /proc/self/mounts")
    found = [line.split()[:4] for line in text.splitlines() if len(line.split()) >= 4]
    table = {point.replace("\\040", " "): (kind, options.split(",")) for _, point, kind, options in found}
    remote = [point for point, (kind, _) in table.items() if kind.startswith(_NETWORKED)]
    silent = [f"{point} ({table[point][0]}) {why}" for point, why in ask_all(remote, answers).items() if why]
    if silent:
        return Result("fail", "; ".join(silent), "check the file server and the network, then mount it again (umount -l)")
    here = max((point for point in table if folder.absolute().is_relative_to(point)), key=len, default=None)
    read_only = [point for point, (kind, options) in table.items() if "ro" in options and kind.startswith(_DISKS)]
    if here is not None and "ro" in table[here][1]:
        return Result(
            "fail", f"{here} is mounted read-only, and {folder} is on it", "look for errors of the disk in dmesg, then mount it again"
        )
    fallen = [point for point in read_only if {"errors=remount-ro", "emergency_ro"} & set(table[point][1])]
    if fallen:
        return Result("warn", f"{', '.join(fallen)} may have become read-only after an error", "look for errors of the disk in dmesg")
    return Result(
        "ok", f"{len(remote)} network mounts answer, {folder} can be written by its mount" if remote else "no mount is read-only or hangs"
    )


def ask_all(points: Sequence[str], answers: Callable[[str], object], seconds: float = _ANSWER) -> dict[str, str]:
    """What is wrong with each mount, "" if it answers. A child that does not return is killed and not waited for."""
    children: dict[int, tuple[str, int]] = {}
    for point in points:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            why = b"answers"
            try:
                answers(point)
            except OSError as error:
                why = f"cannot be read: {error.strerror}".encode()
            finally:
                os.write(writing, why)
                os._exit(0)
        os.close(writing)
        children[child] = point, reading
    found, until = {}, time.monotonic() + seconds
    for child, (point, reading) in children.items():
        os.set_blocking(reading, False)
        said = b""
        while True:  # at least once, also after another one has used up the time
            with suppress(BlockingIOError):
                said = os.read(reading, 1000) or b"ended without an answer"
            if said or time.monotonic() > until:
                break
            time.sleep(0.01)
        os.close(reading)
        if not said:
            os.kill(child, signal.SIGKILL)
        else:
            os.waitpid(child, 0)
        text = said.decode()
        found[point] = "" if text == "answers" else text or f"does not answer within {seconds:g} s"
    return found


def space(folder: Path) -> Result:
    """Free bytes and inodes of the file system of a folder."""
    free, size = machine.free_disk(folder), machine.disk_size(folder)
    left, inodes = machine.inodes(folder)
    figures = {"free_bytes": float(free), "free_inodes": float(left)}
    text = f"{free / 1e9:,.1f} GB of {size / 1e9:,.1f} GB are free for {folder}" + (f", {left:,} inodes" if inodes else "")
    if free < min(_LITTLE, size // 10) or (inodes and left < _FEW):
        return Result("fail", text, "delete files there, or choose another run_dir", figures)
    if free < size // 50:
        return Result("warn", text, "delete files there, or choose another run_dir", figures)
    return Result("ok", text, figures=figures)


def write(node: Node, folder: Path, blocks: int) -> Result:
    """Write blocks of 4 MiB to a file of a folder with fsync, read them back past the page cache, and compare hash and time."""
    try:
        with temporary_folder(folder, ".lmworks-health-") as inside:
            path = inside / "block"
            wrote, times = _write(path, blocks)
            ahead = node.now() - path.stat().st_mtime
            read, reading = _read(path)
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "choose another run_dir, or look for errors of the disk in dmesg")
        return Result("fail", f"{folder} cannot be written: {error.strerror or error}", advice)
    rate = blocks * _BLOCK / sum(times)
    figures = {
        "write_bytes_per_second": rate,
        "read_bytes_per_second": blocks * _BLOCK / max(reading, 1e-9),
        "worst_write_seconds": max(times),
    }
    text = f"{blocks} blocks of 4 MiB on {machine.file_system(folder)}: {rate / 1e6:,.0f} MB/s written, longest {max(times):.2f} s"
    if wrote != read:
        return Result(
            "fail", f"{text}: other bytes were read than were written", "drain the node: its disk or memory changes data", figures
        )
    if abs(ahead) > _SKEW + sum(times):
        how = f"this clock is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} that of the file system"
        return Result("fail", f"{text}; {how}", "set the clocks: chronyc makestep", figures | {"clock_skew_seconds": ahead})
    if rate < _SLOWEST:
        return Result(
            "fail", f"{text}: a save would take minutes per gigabyte", "use another disk, or find what else writes to it", figures
        )
    if rate < _SLOW or max(times) > max(_STALL, 10 * statistics.median(times)):
        return Result("warn", f"{text}: slow or stalling", "use another disk, or find what else writes to it", figures)
    return Result("ok", f"{text}, read back equal", figures=figures)


def _write(path: Path, blocks: int) -> tuple[str, list[float]]:
    """The hash of what was written, and the seconds of each block."""
    data, hashed, times = os.urandom(_BLOCK), hashlib.sha256(), []
    with open(path, "wb", buffering=0) as handle:
        for number in range(blocks):
            block = number.to_bytes(8, "little") + data[8:]
            began = time.perf_counter()
            _whole(handle.fileno(), block)
            os.fsync(handle.fileno())
            times.append(time.perf_counter() - began)
            hashed.update(block)
    return hashed.hexdigest(), times


def _whole(fd: int, block: bytes) -> None:
    left = memoryview(block)
    while left:
        left = left[os.write(fd, left) :]


def _read(path: Path) -> tuple[str, float]:
    """The hash of what is read, and the seconds of reading it from the disk."""
    hashed, began = hashlib.sha256(), time.perf_counter()
    with open(path, "rb", buffering=0) as handle:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := handle.read(_BLOCK):
            hashed.update(block)
    return hashed.hexdigest(), time.perf_counter() - began


def nearest(folder: Path) -> Path:
    """The folder, or the first above it that exists."""
    found = Path(folder).absolute()
    while not found.exists() and found != found.parent:
        found = found.parent
    return found
