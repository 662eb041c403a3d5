"""A cache of token blocks on a local disk, for files in slow or remote storage.

It is set-associative: one file of fixed size holds 16 KiB slots in sets of eight, a block's key selects the set, and the least recently
used slot of the set is replaced. So its size is bounded exactly, it survives restarts, and the processes of a machine share it without a
lock: each reader verifies the checksum of a block, and a block that is half overwritten counts as a miss. The threads of one process, which
read ahead into the same sets, take turns, so that none replaces what another has just stored.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lmworks.errors import UserError
from lmworks.io.files import explain_os_errors
from lmworks.shards.indexed import BLOCK

_WAYS = 8
_TAG = np.dtype([("key", "<u8"), ("used", "<f8")])
_MASK = (1 << 64) - 1


class BlockCache:
    """`get(key)` and `put(key, block)`; keys are 64-bit numbers other than 0, see `block_key`. At most `size` bytes of blocks.

    Raises UserError where the folder cannot be written or its disk has no room for all of it.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.slots = size // BLOCK // _WAYS * _WAYS
        if not self.slots:
            raise UserError(f"shards.cache.max_bytes {size:,} is too small; give it {_WAYS * BLOCK:,} bytes or more")
        self._sets = self.slots // _WAYS
        with explain_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / "lock"):
                names = {f"blocks-{self.slots}", f"tags-{self.slots}"}
                for path in folder.iterdir():
                    if path.name not in names and re.fullmatch(r"(blocks|tags)-\d+", path.name):
                        path.unlink()  # of another size; a process that has it open can still read it
                data = _allocated(folder / f"blocks-{self.slots}", self.slots * BLOCK)
                tags = _allocated(folder / f"tags-{self.slots}", self.slots * _TAG.itemsize)
        self._data = memoryview(data)
        self._putting = threading.Lock()
        self._tags = np.frombuffer(tags, _TAG).reshape(self._sets, _WAYS)

    def get(self, key: int, size: int) -> bytes | None:
        """The first `size` bytes of a block, or None. They may be half overwritten; verify the checksum."""
        row = self._tags[key % self._sets]
        found = np.flatnonzero(row["key"] == np.uint64(key))
        if not found.size:
            return None
        way = int(found[0])
        row["used"][way] = time.time()
        at = (key % self._sets * _WAYS + way) * BLOCK
        return bytes(self._data[at : at + size])

    def put(self, key: int, block: bytes) -> None:
        """Store a block of at most 16 KiB in the least recently used slot of its set."""
        row = self._tags[key % self._sets]
        with self._putting:
            found = np.flatnonzero(row["key"] == np.uint64(key))
            way = int(found[0]) if found.size else int(np.argmin(row["used"]))
            at = (key % self._sets * _WAYS + way) * BLOCK
            row["key"][way] = 0
            self._data[at : at + len(block)] = block
            row["used"][way] = time.time()
            row["key"][way] = key


def block_key(shard_sha256: str, block: int) -> int:
    """The key of a block of the file with this hash."""
    mixed = (int(shard_sha256[:16], 16) + block * 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    return (mixed ^ (mixed >> 31)) or 1


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _allocated(path: Path, size: int) -> mmap.mmap:
    """Map a file of this size, with its disk space allocated, so that later writes cannot fail."""
    with open(path, "r+b" if path.exists() else "w+b") as handle:
        if handle.seek(0, 2) != size:
            try:
                os.posix_fallocate(handle.fileno(), 0, size)
            except OSError as error:
                path.unlink()
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise UserError(f"the disk of {path.parent} has no room for {size:,} bytes; lower shards.cache.max_bytes") from None
                raise
        return mmap.mmap(handle.fileno(), size)
