"""Disks: free space, bandwidth, and the longest single write or read.

A file system that moves token files to slower storage in the background is a common cause of throughput that drops hours after the start
(SmolLM3 report): the mean is good, but single reads take seconds. So the checks look for stalls, without the page cache.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.io.files import temporary_folder
from lmworks.preflight.check_result import CheckContext, CheckResult, Status
from lmworks.recipe.schema.layout import world_size
from lmworks.shards.indexed import token_dtype
from lmworks.ui.amounts import size

_BLOCK = 4 << 20
_WRITES = 8
_READ = 1 << 20
_READS = 48
_STALL = 1.0  # seconds for one block; a healthy disk takes a few hundredths
_STALL_RATIO = 10  # a stall is also this many times longer than the median
_SHARED = ("nfs", "lustre", "wekafs", "ceph", "beegfs", "gpfs", "cifs", "smb", "9p", "fuse.", "afs", "glusterfs")


@dataclass(frozen=True)
class Place:
    """A directory that the run writes to, and the bytes that it still needs there."""

    name: str
    path: Path
    needed: float


def places(context: CheckContext) -> Iterator[Place]:
    """All directories to which the run writes much data."""
    disk, options = context.plan.disk, context.recipe.checkpoints
    copies = disk.checkpoints_kept + 1  # the newest is written before the oldest is removed
    checkpoints = context.run_dir / "checkpoints"
    yield Place("checkpoints", checkpoints, max(0.0, copies * disk.checkpoint - _bytes(checkpoints)))
    yield Place("token files", context.shards_dir, max(0.0, disk.data - _bytes(context.shards_dir)))
    if options.local:
        share = ranks_here(context) / world_size(context.layout)  # the disk of a machine holds only what its own ranks write
        yield Place("checkpoints.local", Path(options.local), (options.keep_last + 1) * disk.checkpoint * min(1.0, share))
    if options.copy_to and "://" not in options.copy_to:
        yield Place("checkpoints.copy_to", Path(options.copy_to), copies * disk.checkpoint)
    if (cache := context.recipe.shards.cache) is not None:
        yield Place("shards.cache", Path(cache.dir), max(0.0, float(cache.max_bytes) - _bytes(Path(cache.dir))))


def ranks_here(context: CheckContext) -> int:
    """Ranks per machine: those started on this one, or the number of devices per machine of the cluster."""
    return machine.ranks_here()[1] if "LOCAL_WORLD_SIZE" in os.environ else context.machine.devices_per_node


def written(context: CheckContext) -> CheckResult:
    """Check the free space for everything planned, and the time of writing tens of megabytes with fsync, on every disk."""
    plan, worst, texts, advice = context.plan, 0, [], []
    figures: dict[str, float] = {}
    disks: dict[int, list[Place]] = {}
    for place in places(context):
        path = nearest(place.path)
        try:
            with scratch(path):
                disks.setdefault(os.stat(path).st_dev, []).append(place)
        except UserError as error:
            worst = 2
            texts.append(f"{place.name}: {error}")
            advice.append(f"choose a writable directory for {place.name}")
    train, step_tokens = context.recipe.train, max(1, plan.tokens // plan.steps)
    apart = [train.save_every.steps(step_tokens=step_tokens, phase_tokens=plan.tokens)]
    apart += [phase.save_every.steps(step_tokens=step_tokens, phase_tokens=phase.tokens) for phase in train.phases if phase.save_every]
    share = min(apart) / plan.steps
    for here in disks.values():
        names, path = ", ".join(place.name for place in here), nearest(here[0].path)
        asked, free = sum(place.needed for place in here), float(machine.free_disk(path))
        times = write_times(path)
        rate = _BLOCK * len(times) / sum(times)
        figures |= {f"{here[0].name}/free_bytes": free, f"{here[0].name}/needed_bytes": asked,
                    f"{here[0].name}/write_bytes_per_second": rate, f"{here[0].name}/worst_write_seconds": max(times)}  # fmt: skip
        texts.append(f"{names}: {size(asked)} to write, {size(free)} free, {size(rate)}/s, worst of {len(times)} blocks {max(times):.2f} s")
        if asked > free:
            worst = 2
            advice.append(f"free {size(asked - free)} for {names}, keep fewer (checkpoints.keep_last), or choose another disk")
        elif plan.disk.checkpoint / rate > share * plan.seconds and here[0].name.startswith("checkpoints"):
            worst = max(worst, 1)
            advice.append(f"a save takes {plan.disk.checkpoint / rate:,.0f} s, longer than the time between two: raise train.save_every")
        elif stalled(times):
            worst = max(worst, 1)
            advice.append(f"writes to {path} stall: look for a full or shared disk; checkpoints.local keeps saves on a disk of the machine")
    if "://" in (context.recipe.checkpoints.copy_to or ""):
        texts.append("checkpoints.copy_to is remote and not measured")
    results: tuple[Status, ...] = ("ok", "warn", "fail")
    return CheckResult(results[worst], "; ".join(texts), "; ".join(advice), figures)


def read(context: CheckContext) -> CheckResult:
    """Compare the bandwidth of random reads of token files with that of training, and find the longest single read."""
    context.need_shards()
    files = sorted(context.shards_dir.rglob("*.bin"))
    times, count = read_times(files, random.Random(context.recipe.seed))
    if not count:
        return CheckResult("fail", "the token files are empty", f"delete {context.shards_dir} and run: lmworks shards build {context.name}")
    rate, worst = count / sum(times), max(times)
    wanted = context.plan.tokens_per_second * token_dtype(context.recipe.model.vocab_size or 0).itemsize
    kind = machine.file_system(context.shards_dir)
    figures = {"read_bytes_per_second": rate, "needed_bytes_per_second": wanted, "worst_read_seconds": worst}
    text = f"{size(rate)}/s at random places on {kind}, {size(wanted)}/s needed, worst of {len(times)} reads {worst:.3f} s"
    remedy = "put the token files on a disk of the machine: --set shards.cache.dir=DIR, with shards.cache.max_bytes as large as they are"
    if rate < wanted:
        return CheckResult("fail", f"{text}: training would wait for its data", remedy, figures)
    if stalled(times):
        return CheckResult("warn", f"{text}: single reads stall, as if a file system had moved files to slower storage", remedy, figures)
    if kind.startswith(_SHARED) and context.recipe.shards.cache is None:
        return CheckResult("warn", f"{text}; a shared file system may slow down or move files during the run", remedy, figures)
    return CheckResult("ok", text, figures=figures)


def stalled(times: Sequence[float]) -> bool:
    """Whether one of these times is an outlier."""
    return max(times) > _STALL and max(times) > _STALL_RATIO * statistics.median(times)


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A temporary directory inside `folder`. Raises `UserError` if it cannot be created."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(temporary_folder(folder, ".preflight-"))
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror or error})") from None
        yield made


def write_times(folder: Path) -> list[float]:
    """Seconds to write and sync each of several blocks to a temporary file."""
    data, times = os.urandom(_BLOCK), []
    with tempfile.TemporaryFile(dir=folder) as handle:
        for _ in range(_WRITES):
            began = time.perf_counter()
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
            times.append(time.perf_counter() - began)
    return times


def read_times(files: Sequence[Path], draw: random.Random) -> tuple[list[float], int]:
    """Seconds of each of several random reads, and the total number of bytes read."""
    files = [path for path in files if path.stat().st_size]
    times, count = [], 0
    for _ in range(_READS if files else 0):
        path = draw.choice(files)
        start = draw.randrange(max(1, path.stat().st_size - _READ))
        began = time.perf_counter()
        count += read_block(path, start)
        times.append(time.perf_counter() - began)
    return times, count


def read_block(path: Path, start: int) -> int:
    """Read a block from the disk, not from the page cache; returns the number of bytes."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, start, _READ, os.POSIX_FADV_DONTNEED)
        return len(os.pread(fd, _READ, start))
    finally:
        os.close(fd)


def nearest(path: Path) -> Path:
    """The path, or the first directory above it that exists."""
    path = Path(path).absolute()
    return path if path.is_dir() else nearest(path.parent)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
