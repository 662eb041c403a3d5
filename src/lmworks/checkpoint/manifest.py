"""The manifest: size and BLAKE3 hash of each file of a checkpoint. It is written last.

A directory without a manifest is not a checkpoint. Every byte of a checkpoint is covered: the files by their hashes, the manifest by a
hash over its own entries and by its canonical form.

The hashes detect damage, not forgery: anybody can compute them. So whatever a manifest names, only regular files in the directory with
one of the names below are opened, and metadata files are read up to a size limit.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from lmworks.host import machine
from lmworks.io.files import blake3_of

NAME = "manifest.json"
DATA = "data-"  # how the names of the files with the elements of tensors begin
_NAMES = re.compile(rf"{DATA}\d{{5,}}-\d{{5,}}\.bin|meta\.json|tensors\.jsonl\.gz")
MOST_DOCUMENT = 1 << 30  # bytes of a document; that of the largest layouts takes tens of megabytes
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Entry:
    """One file: its size in bytes and the hex BLAKE3 of its content."""

    bytes: int
    blake3: str


def entry_of(data: bytes) -> Entry:
    """The manifest entry of a file with these bytes."""
    return Entry(len(data), blake3(data).hexdigest())


def canonical(files: dict[str, Entry]) -> bytes:
    """The canonical bytes of the manifest of `files`."""
    body: dict[str, Any] = {"format": 2, "files": {name: vars(files[name]) for name in sorted(files)}}
    body["blake3"] = blake3(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps(body, indent=1).encode() + b"\n"


def write_synced(path: Path, data: bytes) -> Entry:
    """Write a new file, sync it, and return its manifest entry."""
    with open(path, "xb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    return entry_of(data)


def open_regular(path: Path) -> FileIO:
    """Open a file to read; `OSError` for a link, a pipe, a device or a directory, without blocking on any of them."""
    handle = FileIO(str(path), "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def read_document(path: Path) -> bytes:
    """The bytes of a metadata file. `OSError` if it is not a regular file, or too large."""
    with open_regular(path) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > MOST_DOCUMENT:
            raise OSError(errno.EFBIG, f"its {size:,} bytes are too many for a metadata file", str(path))
        return handle.readall()


def entries(directory: Path) -> dict[str, Entry]:
    """The files that the manifest names; `ValueError` with the reason if the manifest is missing or damaged."""
    try:
        data = read_document(directory / NAME)
    except FileNotFoundError:
        raise ValueError(f"{NAME} is missing") from None
    except OSError as error:
        raise ValueError(f"{NAME} cannot be read ({error.strerror})") from None
    try:
        files = {str(name): Entry(int(entry["bytes"]), str(entry["blake3"])) for name, entry in json.loads(data)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ValueError(f"{NAME} is not readable") from None
    if canonical(files) != data or any(not _NAMES.fullmatch(name) or entry.bytes < 0 for name, entry in files.items()):
        raise ValueError(f"{NAME} does not match what was written")
    return files


def problem(directory: Path, share: tuple[int, int] = (0, 1), advance: Callable[[int], None] | None = None) -> str | None:
    """Why the directory is not a good checkpoint, or None. Hashes in parallel threads.

    share: (rank, ranks); each rank hashes its share of the files, so that many machines verify a large checkpoint together.
    advance: called with the bytes that were hashed, from several threads.
    """
    try:
        files = entries(directory)
    except (ValueError, OSError) as error:
        return str(error)
    rank, ranks = share
    return differing(directory, {name: files[name] for name in sorted(files)[rank::ranks]}, advance)


def differing(directory: Path, files: dict[str, Entry], advance: Callable[[int], None] | None = None) -> str | None:
    """The files that do not match the manifest, with reasons, or None. Hashes in parallel threads."""
    reasons: dict[str, str] = {}
    parallel(lambda name: _check(directory / name, files[name], reasons, advance), sorted(files))
    return "; ".join(reasons[name] for name in sorted(reasons)) or None


def hash_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Hex BLAKE3 of a file's bytes."""
    with open_regular(path) as handle:
        return blake3_of(handle, advance)


def _check(path: Path, expected: Entry, reasons: dict[str, str], advance: Callable[[int], None] | None) -> None:
    try:
        size = path.lstat().st_size
        if size != expected.bytes:
            reasons[path.name] = f"{path.name} has {size} bytes, not {expected.bytes}"
        elif hash_file(path, advance) != expected.blake3:
            reasons[path.name] = f"{path.name} has other content than was written (its hash differs)"
    except FileNotFoundError:
        reasons[path.name] = f"{path.name} is missing"
    except OSError as error:
        reasons[path.name] = f"{path.name} cannot be read ({error.strerror})"


def parallel(work: Callable[[_Item], None], items: Iterable[_Item], threads: int = 8) -> None:
    """Call `work` on each item in a few threads, no more than there are cores, and raise the first exception. (An executor refuses work
    while Python shuts down, which is when a last save may still be running.)"""
    queue, lock = iter(list(items)), threading.Lock()
    failures: list[BaseException] = []

    def run() -> None:
        while not failures:
            with lock:
                item = next(queue, None)
            if item is None:
                return
            try:
                work(item)
            except BaseException as error:
                failures.append(error)

    helpers = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, machine.cores()) - 1)]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]
