"""The files of tensors in a checkpoint: raw bytes in `data-WRITER-NUMBER.bin`, and a table of the slices in them (`tensors.jsonl.gz`).

A tensor is saved in the slices that the ranks hold, and can be read in any other slices: this is how a checkpoint is resharded. The table
has one line of JSON per data file. Each writer compresses its own lines and rank 0 only concatenates them, so that its work does not grow
with the slices of thousands of ranks. (PyTorch's distributed checkpoint stores its table as a pickle, which runs code when it is opened.)
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from lmworks.checkpoint import manifest
from lmworks.checkpoint.save_plan import TensorSlice
from lmworks.errors import UserError
from lmworks.io.files import read_at_most, sync_directory

TABLE = "tensors.jsonl.gz"
_FILE_BYTES = 1 << 30
_BLOCK = 1 << 24
_COMPARED = 1 << 18  # bytes at a time: Python compares them under its lock
_THREADS = 4


@dataclass(frozen=True)
class Written:
    """The output of one writer: the manifest entries of its files, and its lines of the table, compressed."""

    files: dict[str, manifest.Entry]
    table: bytes


@dataclass(frozen=True)
class SavedSlice:
    """A saved slice of a tensor, and its place: `at` is a byte offset in `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor: its dtype, its shape, and the slices that it consists of."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: list[SavedSlice]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Table = dict[str, SavedTensor]


def raw_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor in row-major order as bytes. No copy if the tensor is contiguous in CPU memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def write_slices(directory: Path, writer: int, parts: Iterable[TensorSlice], *, file_bytes: int | None = None) -> Written:
    """Write the data files of one writer into `directory`, in a few threads. Each file is hashed while it is written, synced, read back and
    compared with memory. Raises OSError."""
    groups = list(enumerate(_split(parts, file_bytes or _FILE_BYTES)))
    found: dict[str, tuple[manifest.Entry, str]] = {}

    def write(group: tuple[int, list[TensorSlice]]) -> None:
        name = f"data-{writer:05d}-{group[0]:05d}.bin"
        found[name] = _write_file(directory / name, group[1])

    manifest.parallel(write, groups, _THREADS)
    lines = [found[name][1] for name in sorted(found)]
    return Written({name: entry for name, (entry, _) in found.items()}, compressed(lines))


def _write_file(path: Path, parts: Sequence[TensorSlice]) -> tuple[manifest.Entry, str]:
    hasher, offset = blake3(), 0
    with open(path, "xb", buffering=0) as handle:
        for part in parts:
            data = raw_bytes(part.values())
            assert data.nbytes == part.bytes, f"{part.name}: {data.nbytes} bytes, not {part.bytes}"
            for begin in range(0, data.nbytes, _BLOCK):
                block = data[begin:begin + _BLOCK]
                hasher.update(block)
                while block:
                    block = block[handle.write(block):]
            offset += data.nbytes
        os.fsync(handle.fileno())
        # Drop the cached pages, so that reading back reads the disk.
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    entry = manifest.Entry(offset, hasher.hexdigest())
    if not _reads_back(path, parts):
        raise OSError(f"{path} read back differs from what was written; the disk or its driver is faulty")
    return entry, line_of(path.name, parts)


def _reads_back(path: Path, parts: Sequence[TensorSlice]) -> bool:
    """Whether the file on disk equals memory. Comparing takes less CPU time from training than hashing again."""
    found = bytearray()  # compared as one piece of memory, eighty times as fast as a memoryview of it
    with open(path, "rb", buffering=0) as handle:
        for part in parts:
            data = raw_bytes(part.values())
            for begin in range(0, data.nbytes, _COMPARED):
                expected = data[begin:begin + _COMPARED]
                if len(found) != expected.nbytes:
                    found = bytearray(expected.nbytes)
                if handle.readinto(found) != expected.nbytes or found != expected:
                    return False
    return True


def line_of(file: str, parts: Sequence[TensorSlice]) -> str:
    """The line of the table for a file: its slices in file order, each with its byte offset."""
    rows, offset = [], 0
    for part in parts:
        rows.append((part.name, str(part.dtype).removeprefix("torch."), part.shape, part.offsets, part.sizes, offset))
        offset += part.bytes
    return json.dumps({"file": file, "parts": rows}, separators=(",", ":"))


def compressed(lines: Sequence[str]) -> bytes:
    """Lines of the table, compressed. Compressed pieces may be concatenated."""
    return gzip.compress("".join(line + "\n" for line in lines).encode(), mtime=0) if lines else b""


def _split(parts: Iterable[TensorSlice], limit: int) -> list[list[TensorSlice]]:
    """Slices in groups of about `limit` bytes, one per file. Whole tensors, which other ranks read too, are not mixed with shards."""
    groups: list[list[TensorSlice]] = []
    room = 0
    for part in sorted(parts, key=lambda part: part.sizes != part.shape):
        if not groups or part.bytes > room or (part.sizes != part.shape) != (groups[-1][-1].sizes != groups[-1][-1].shape):
            groups.append([])
            room = limit
        groups[-1].append(part)
        room -= part.bytes
    return groups


def metadata_files(written: Sequence[Written], small: dict[str, Any]) -> dict[str, bytes]:
    """The metadata files of a checkpoint, by name, in the order in which they are written: `small` as JSON, the table, the manifest."""
    made = {name: json.dumps(value, indent=1).encode() + b"\n" for name, value in small.items()}
    made[TABLE] = b"".join(one.table for one in written)
    files = {name: entry for one in written for name, entry in one.files.items()}
    files |= {name: manifest.entry_of(data) for name, data in made.items()}
    return made | {manifest.NAME: manifest.canonical(files)}


def write_metadata(directory: Path, made: dict[str, bytes]) -> None:
    """Write and sync the metadata files in their order, then sync the directory."""
    for name, data in made.items():
        manifest.write_synced(directory / name, data)
    sync_directory(directory)


def parse_table(data: bytes, files: Mapping[str, manifest.Entry], names: Collection[str] | None = None) -> Table:
    """The saved tensors (or those in `names`) by name; `files` are those of the manifest.

    Raises `ValueError` for an invalid table: one that names other files, offsets beyond their ends, or things that are not tensors.
    """
    table: Table = {}
    for line in _lines(data, sum(entry.bytes for entry in files.values())):
        try:
            document = json.loads(line)
            file, parts = document["file"], document["parts"]
            size = files[file].bytes if file.startswith(manifest.DATA) else 0
            for name, dtype, shape, offsets, sizes, at in parts:
                chunk = SavedSlice(_numbers(offsets), _numbers(sizes), file, *_numbers([at]))
                record = SavedTensor(_DTYPES[dtype], _numbers(shape), [])
                if not isinstance(name, str):
                    raise ValueError(f"{name} is no name of a tensor")
                if not len(record.shape) == len(chunk.offsets) == len(chunk.sizes):
                    raise ValueError(f"a slice of {name} has another number of dimensions")
                if at + math.prod(chunk.sizes) * record.dtype.itemsize > size:
                    raise ValueError(f"{name} reaches beyond the end of {file}")
                if names is None or name in names:
                    known = table.setdefault(name, record)
                    if (known.dtype, known.shape) != (record.dtype, record.shape):
                        raise ValueError(f"{name} has two types or shapes")
                    known.slices.append(chunk)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{TABLE} does not match what was written ({error})") from None
    return table


_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _numbers(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("an offset or size is not a number")
    return tuple(values)


def _lines(data: bytes, described: int) -> list[bytes]:
    """The lines of a compressed table that describes `described` bytes of tensors. Its size is bounded, against decompression bombs."""
    most = min(manifest.MOST_DOCUMENT, (1 << 24) + described)
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            text = read_at_most(file, most + 1) if data else b""
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{TABLE} does not match what was written ({error})") from None
    if len(text) > most:
        raise ValueError(f"{TABLE} is longer than {most:,} bytes, too long for the tensors that it describes")
    return text.splitlines()


def read_table(directory: Path) -> Table:
    """All tensors in a checkpoint, by name. Raises `UserError` for an invalid table."""
    try:
        return parse_table(manifest.read_document(directory / TABLE), manifest.entries(directory))
    except ValueError as error:
        raise UserError(f"{directory} is damaged: {error}") from None


class Reader:
    """Reads slices of the tensors of a checkpoint in `directory`. `local_files` maps names of files to copies that are read instead."""

    def __init__(self, directory: Path, table: Table | None = None, local_files: Mapping[str, Path] | None = None) -> None:
        self.directory, self.table, self._local_files = directory, read_table(directory) if table is None else table, local_files or {}

    def files(self, parts: Iterable[TensorSlice]) -> set[str]:
        """The data files that contain these slices."""
        return {chunk.file for part in parts for chunk, _ in self._overlaps(part)}

    def fill(self, parts: Iterable[TensorSlice]) -> None:
        """Read the values of the slices, in a few threads. Raises `UserError` if a file is truncated or elements of a slice were not
        saved."""
        manifest.parallel(self._fill, list(parts), _THREADS)

    def read_slice(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """One slice, in CPU memory."""
        record = self.table[name]
        values = torch.empty(sizes, dtype=record.dtype)
        self._fill(TensorSlice(name, record.dtype, record.shape, offsets, sizes, lambda: values))
        return values

    def _overlaps(self, part: TensorSlice) -> list[tuple[SavedSlice, list[tuple[int, int]]]]:
        """The saved slices that overlap with `part`, and the bounds of the overlap in each dimension."""
        found = []
        for chunk in self.table[part.name].slices:
            bounds = [
                (max(a, b), min(a + m, b + n))
                for a, m, b, n in zip(part.offsets, part.sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(low < high for low, high in bounds):
                found.append((chunk, bounds))
        return found

    @torch.no_grad()
    def _fill(self, part: TensorSlice) -> None:
        target, left = part.values(), math.prod(part.sizes)
        for chunk, bounds in self._overlaps(part) if left else ():
            to = target
            for dim, ((low, high), begin) in enumerate(zip(bounds, part.offsets, strict=True)):
                to = to.narrow(dim, low - begin, high - low)
            self._read(chunk, part.dtype, bounds, to)
            left -= to.numel()
        if left:
            raise UserError(f"{self.directory} is damaged: {left} elements of {part.name} were never saved; use another checkpoint")

    def _read(self, chunk: SavedSlice, dtype: torch.dtype, bounds: list[tuple[int, int]], to: Tensor) -> None:
        """Read only the rows that overlap, directly into the target if its memory has the same layout as the file."""
        path = self._local_files.get(chunk.file, self.directory / chunk.file)
        row = math.prod(chunk.sizes[1:]) * dtype.itemsize
        first = (bounds[0][0] - chunk.offsets[0]) * row if bounds else 0
        sizes = [high - low for low, high in bounds[:1]] + list(chunk.sizes[1:])
        whole = list(to.shape) == sizes
        rows = to if whole and to.is_contiguous() and to.device.type == "cpu" and to.dtype == dtype else torch.empty(sizes, dtype=dtype)
        with manifest.open_regular(path) as handle:
            _read_into(handle.fileno(), chunk.at + first, raw_bytes(rows), path)
        if rows is not to:
            for dim, ((low, high), begin) in enumerate(zip(bounds, chunk.offsets, strict=True)):
                if dim:
                    rows = rows.narrow(dim, low - begin, high - low)
            to.copy_(rows)


def split_rows(record: SavedTensor, limit: int = 1 << 26) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Slices (offsets, sizes) of about `limit` bytes along the first dimension, so that the tensor need not fit into memory."""
    if not record.shape:
        return [((), ())]
    rows, rest = record.shape[0], record.shape[1:]
    step = max(1, limit // max(1, math.prod(rest) * record.dtype.itemsize))
    starts = range(0, rows, step) if rows else (0,)
    return [((start, *(0,) * len(rest)), (min(step, rows - start), *rest)) for start in starts]


def incomplete_tensors(table: Table) -> list[str]:
    """Names of tensors whose saved slices do not add up to the whole tensor."""
    return [name for name, one in table.items() if sum(math.prod(chunk.sizes) for chunk in one.slices) != math.prod(one.shape)]


def _read_into(fd: int, offset: int, target: memoryview, path: Path) -> None:
    while target:
        count = os.preadv(fd, [target], offset)
        if not count:
            raise UserError(f"{path} is truncated; use another checkpoint")
        target, offset = target[count:], offset + count
