"""Block checksums: each block of a token file is verified when it is first read.

A shard of a terabyte source cannot be hashed before each start, and its first batch may touch any part of it. So `PREFIX.crc` holds a
CRC-32 for each 16 KiB of `PREFIX.bin`, itself under the manifest's SHA-256; a flipped bit stops the run before it reaches a batch.

Megatron's indexed token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` the offsets of sequences and documents.

Layout of `.idx`, little-endian: `MMIDIDX\0\0`, version 1 (u64), type code (u8), number of sequences (u64), length of the document
list (u64), then sequence lengths (i32), byte offsets of the sequences (i64), and the document list (i64): the first sequence of each
document, and the number of sequences at the end. We write one sequence per document and read any.

A tuning shard has a third file, `PREFIX.mask`: one byte per token, 1 where the token is to be learned.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from array import array
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Protocol
from zlib import crc32

import numpy as np

from lmworks.errors import UserError
from lmworks.io.files import atomic_path

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


_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _TYPES.items()}
_UINT16_VOCABULARY = 65_500


def token_dtype(vocab_size: int) -> np.dtype:
    """The type that Megatron's tools choose for a vocabulary: uint16 below 65,500 entries, else int32."""
    return np.dtype("<u2") if vocab_size < _UINT16_VOCABULARY else np.dtype("<i4")


def with_ending(prefix: Path, ending: str) -> Path:
    """`PREFIX` + `ending`; a dot inside the prefix stays where it is."""
    return prefix.with_name(prefix.name + ending)


class IndexedWriter:
    """Writes one shard; `with IndexedWriter(prefix, dtype) as writer: writer.add(tokens)`.

    No file has its final name before the block ends without an error, and `.idx` gets its name last: if it exists, the others do.
    """

    def __init__(self, prefix: Path, dtype: np.dtype, mask: bool = False) -> None:
        self.prefix, self.dtype, self.tokens = Path(prefix), np.dtype(dtype), 0
        self._has_mask, self._sizes, self._stack = mask, array("i"), ExitStack()

    def __enter__(self) -> IndexedWriter:
        self._bin = self._stack.enter_context(open(self._stack.enter_context(atomic_path(with_ending(self.prefix, ".bin"))), "wb"))
        if self._has_mask:
            self._mask = self._stack.enter_context(open(self._stack.enter_context(atomic_path(with_ending(self.prefix, ".mask"))), "wb"))
        return self

    def add(self, tokens: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append one document: (n,) token ids and, in a shard with a mask, (n,) booleans."""
        assert (mask is not None) == self._has_mask, "a mask belongs to every document or to none"
        self._bin.write(np.ascontiguousarray(tokens, self.dtype).data)
        if mask is not None:
            assert len(mask) == len(tokens), "one mask entry per token"
            self._mask.write(np.ascontiguousarray(mask, np.uint8).data)
        self._sizes.append(len(tokens))
        self.tokens += len(tokens)

    @property
    def documents(self) -> int:
        """Documents added so far."""
        return len(self._sizes)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)
        if kind is not None:
            return
        sizes = np.frombuffer(self._sizes, np.int32) if self._sizes else np.empty(0, np.int32)
        pointers = np.zeros(len(sizes), "<i8")
        np.cumsum(sizes[:-1], out=pointers[1:])
        with atomic_path(with_ending(self.prefix, ".idx")) as aside, open(aside, "wb") as handle:
            handle.write(_HEADER.pack(_MAGIC, 1, _CODES[self.dtype], len(sizes), len(sizes) + 1))
            handle.write(sizes.astype("<i4").data)
            handle.write((pointers * self.dtype.itemsize).data)
            handle.write(np.arange(len(sizes) + 1, dtype="<i8").data)


class IndexedFile:
    """Reads one shard through memory maps: opening costs the same for a thousand and for a billion documents.

    `mask` is (n,) uint8 or None. `data` replaces `PREFIX.bin` as the source of the tokens, and `index` replaces `PREFIX.idx`.
    Raises UserError if files are missing or their sizes contradict each other.
    """

    def __init__(self, prefix: Path, data: Data | None = None, index: Path | None = None) -> None:
        self.prefix = Path(prefix)
        index_path, bin_path = index or with_ending(self.prefix, ".idx"), with_ending(self.prefix, ".bin")
        table = map_file(index_path)
        if len(table) < _HEADER.size:
            raise damaged(index_path, f"is cut off after {len(table)} bytes")
        magic, version, code, sequences, entries = _HEADER.unpack_from(table)
        if magic != _MAGIC or version != 1 or code not in _TYPES:
            raise damaged(index_path, "is not a Megatron index (wrong first bytes)")
        expected = _HEADER.size + 12 * sequences + 8 * entries
        if len(table) != expected:
            raise damaged(index_path, f"has {len(table)} bytes where its header states {expected}")
        self.dtype = np.dtype(_TYPES[code])
        at_pointers = _HEADER.size + 4 * sequences
        self._lengths = np.frombuffer(table, "<i4", sequences, _HEADER.size)
        self._pointers = np.frombuffer(table, "<i8", sequences, at_pointers)
        self._documents = np.frombuffer(table, "<i8", entries, at_pointers + 8 * sequences)
        self.documents = max(entries - 1, 0)
        self.data: Data = MappedData(bin_path) if data is None else data
        promised = int(self._pointers[-1]) + int(self._lengths[-1]) * self.dtype.itemsize if sequences else 0
        if len(self.data) != promised:
            raise damaged(bin_path, f"has {len(self.data)} bytes where its index states {promised}")
        self._count = promised // self.dtype.itemsize

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, (n,) in the file's type."""
        return self.read(0, self._count)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), (stop - start,) in the file's type; a view of the file where it lies on this machine."""
        width = self.dtype.itemsize
        return self.data.read(start * width, stop * width).view(self.dtype)

    @cached_property
    def mask(self) -> np.ndarray | None:
        path = with_ending(self.prefix, ".mask")
        if not path.exists():
            return None
        mask = np.frombuffer(map_file(path), np.uint8)
        if len(mask) != len(self):
            raise damaged(path, f"has {len(mask)} entries for {len(self)} tokens")
        return mask

    def document_start(self, document: np.ndarray) -> np.ndarray:
        """The first token of each of the given documents, int64; the number of documents stands for the end of the file."""
        document = np.asarray(document, np.int64)
        inside = np.minimum(document, self.documents - 1)
        try:
            starts = self._pointers[self._documents[inside]] // self.dtype.itemsize
        except IndexError as error:
            raise damaged(with_ending(self.prefix, ".idx"), f"names sequences that it does not have ({error})") from None
        return np.where(document < self.documents, starts, len(self))

    def documents_until(self, position: np.ndarray) -> np.ndarray:
        """How many documents begin at or before each token position, int64.

        A bisection of all positions at once. np.searchsorted would copy the whole index first, since it is not aligned in the file.
        """
        position = np.asarray(position, np.int64)
        low, high = np.zeros_like(position), np.full_like(position, self.documents)
        for _ in range(self.documents.bit_length()):
            middle = (low + high) // 2
            begun = (low < high) & (self.document_start(middle) <= position)
            low, high = np.where(begun, middle + 1, low), np.where(begun | (low == high), high, middle)
        return low

    def document(self, number: int) -> np.ndarray:
        """The tokens of one document, a view."""
        start, stop = self.document_start(np.array([number, number + 1])).tolist()
        return self.read(start, stop)
