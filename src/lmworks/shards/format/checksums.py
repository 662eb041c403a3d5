"""Block checksums: each block of a token file is verified when it is first read.

A shard of a terabyte source cannot be hashed before each start, and its first batch may touch any part of it. So `PREFIX.crc` holds a
CRC-32 for each 16 KiB of `PREFIX.bin`, itself under the manifest's SHA-256; a flipped bit stops the run before it reaches a batch.
"""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path
from typing import Protocol
from zlib import crc32

import numpy as np

from lmworks.errors import UserError

BLOCK = 1 << 14
ENDING = ".crc"
_AGAIN = "delete the folder {folder} and run the same command again to have it made anew"


class Data(Protocol):
    """A source of the bytes of a shard."""

    def __len__(self) -> int:
        """Bytes in the file."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop), uint8."""


def fingerprints(path: Path) -> tuple[str, np.ndarray]:
    """Hex SHA-256 of a file and the CRC-32 of each of its blocks, (n,) uint32, in one pass."""
    digest, sums = hashlib.sha256(), []
    with open(path, "rb") as handle:
        while piece := handle.read(64 * BLOCK):
            digest.update(piece)
            view = memoryview(piece)
            sums += [crc32(view[at : at + BLOCK]) for at in range(0, len(piece), BLOCK)]
    return digest.hexdigest(), np.array(sums, "<u4")


def read_checksums(path: Path, expected_sha256: str, size: int) -> np.ndarray:
    """The `.crc` of a shard whose `.bin` has `size` bytes; UserError if it is damaged."""
    data = read_whole(path, expected_sha256)
    if len(data) != 4 * -(-size // BLOCK):
        raise damaged(path, f"has {len(data)} bytes where {size:,} bytes of tokens need {4 * -(-size // BLOCK)}")
    return np.frombuffer(data, "<u4")


def read_whole(path: Path, expected_sha256: str) -> bytes:
    """A small file beside a shard; UserError if it is damaged."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise damaged(path, "is missing") from None
    if hashlib.sha256(data).hexdigest() != expected_sha256:
        raise damaged(path, "is damaged (its hash differs)")
    return data


class MappedData:
    """A memory-mapped file. Without `checksums` nothing is verified."""

    def __init__(self, path: Path, checksums: np.ndarray | None = None) -> None:
        self._path, self._checksums = Path(path), checksums
        data = map_file(self._path)
        self._bytes = memoryview(data)
        self.array = np.frombuffer(data, np.uint8)
        self._good = None if checksums is None else np.zeros(len(checksums), bool)

    def __len__(self) -> int:
        return len(self._bytes)

    def read(self, start: int, stop: int) -> np.ndarray:
        if self._good is not None and self._checksums is not None and stop > start:
            first, past = start // BLOCK, (stop - 1) // BLOCK + 1
            for block in first + np.flatnonzero(~self._good[first:past]):
                if crc32(self._bytes[block * BLOCK : (block + 1) * BLOCK]) != self._checksums[block]:
                    at = int(block) * BLOCK
                    raise damaged(self._path, f"is damaged (its checksum differs at byte {at:,})")
                self._good[block] = True
        return self.array[start:stop]


def map_file(path: Path) -> mmap.mmap | bytes:
    """Map a file into memory, without reading it."""
    try:
        with open(path, "rb") as handle:
            size = handle.seek(0, 2)
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except FileNotFoundError:
        raise damaged(path, "is missing") from None


def damaged(path: Path, what: str) -> UserError:
    """A one-line error that names the damaged file and the remedy."""
    return UserError(f"token shard {path} {what}; " + _AGAIN.format(folder=path.parent))
