"""Row plans: which documents share a row, stored once per shard and sequence length (`shards.packing: best_fit`).

The packing of a shard follows from the lengths of its documents alone: documents longer than a row are cut into whole rows and a rest,
the rests and the others are packed by best-fit decreasing (`lmworks.shards.packing.best_fit`). It is written to `packing/LENGTH/` below the
shards and read through a memory map, so that the batch of any step is found at once, in memory that does not grow. Rows never
reach beyond a shard. A document belongs to the phase in whose range it begins, so that none is read by two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lmworks.files import atomic_path, read_json, write_json
from lmworks.pool import map_unordered
from lmworks.progress import bar
from lmworks.shards.format.checksums import damaged, map_file
from lmworks.shards.format.indexed import IndexedFile
from lmworks.shards.format.manifest import Manifest, Shard
from lmworks.shards.format.token_stream import TokenStream
from lmworks.shards.packing.best_fit import best_fit

FOLDER = "packing"
_COUNTS = "counts.json"
_WORTH_PROCESSES = 500_000  # documents that are packed while a process starts


class DocumentRange(NamedTuple):
    """Documents [first, past) of a shard; their rows are stored in the file `name`."""

    shard: int
    first: int
    past: int
    name: str


class RowPlans:
    """The rows of every range that phases read. Missing plans are made on first use, in several processes where that is worth it."""

    def __init__(self, shards_dir: Path, manifest: Manifest, streams: Mapping[str, TokenStream], processes: int = 1) -> None:
        self._folder, self._streams, self._processes = Path(shards_dir) / FOLDER, streams, processes
        self._shards = {name: manifest.source(name).train.shards for name in streams}
        self._ends: dict[tuple[str, tuple[int, ...], int], tuple[list[DocumentRange], np.ndarray]] = {}
        self._load = lru_cache(maxsize=256)(_load)

    def count_rows(self, source: str, borders: Sequence[int], length: int) -> int:
        """The number of rows of the documents that begin between the first and the last border."""
        return int(self._parts(source, tuple(borders), length)[1][-1])

    def row(self, source: str, borders: Sequence[int], length: int, number: int) -> tuple[int, np.ndarray]:
        """The shard of a row, and its pieces (n, 2) int64: first token in the shard, and how many inputs."""
        parts, ends = self._parts(source, tuple(borders), length)
        place = int(np.searchsorted(ends, number, side="right")) - 1
        past, pieces = self._load(self._folder / str(length) / parts[place].name)
        inside = number - int(ends[place])
        return parts[place].shard, pieces[int(past[inside - 1]) if inside else 0 : int(past[inside])]

    def _parts(self, source: str, borders: tuple[int, ...], length: int) -> tuple[list[DocumentRange], np.ndarray]:
        known = self._ends.get((source, borders, length))
        if known is None:
            parts = [part for start, stop in pairwise(borders) for part in self._documents(source, start, stop)]
            counts = self._count(source, parts, length)
            known = self._ends[source, borders, length] = parts, np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        return known

    def _documents(self, source: str, start: int, stop: int) -> list[DocumentRange]:
        """The documents that begin in [start, stop), shard by shard; only a shard that a border cuts is opened."""
        stream, parts = self._streams[source], []
        for number, shard in enumerate(self._shards[source]):
            base, end = int(stream.offsets[number]), int(stream.offsets[number + 1])
            if stop <= base or start >= end:
                continue
            first = 0 if start <= base else _begun(stream.file(number), start - base)
            past = shard.documents if stop >= end else _begun(stream.file(number), stop - base)
            if past > first:
                parts.append(DocumentRange(number, first, past, _name(shard, first, past)))
        return parts

    def _count(self, source: str, parts: Sequence[DocumentRange], length: int) -> list[int]:
        folder = self._folder / str(length)
        known = read_json(folder / _COUNTS) if (folder / _COUNTS).exists() else {}
        missing = [part for part in parts if part.name not in known]
        if missing:
            tasks = [(self._streams[source].prefixes[part.shard], part.first, part.past, length, folder / part.name) for part in missing]
            documents = sum(part.past - part.first for part in missing)
            with bar(f"rows of {source}", documents) as progress:
                for task, rows in map_unordered(self._processes if documents > _WORTH_PROCESSES else 1, make_plan, tasks):
                    known[task[-1].name] = rows
                    progress.advance(task[2] - task[1])
            others = read_json(folder / _COUNTS) if (folder / _COUNTS).exists() else {}
            write_json(folder / _COUNTS, others | known)
        return [known[part.name] for part in parts]


def make_plan(prefix: Path, first: int, past: int, length: int, path: Path) -> int:
    """Write the rows of documents [first, past) of a shard to `path`; returns how many there are."""
    if path.exists():
        return len(_load(path)[0])
    ends, pieces = pack(IndexedFile(prefix), first, past, length)
    with atomic_path(path) as aside, open(aside, "wb") as handle:
        handle.write(np.concatenate(([len(ends)], ends, pieces.reshape(-1))).astype("<i8").data)
    return len(ends)


def pack(file: IndexedFile, first: int, past: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit rows of documents [first, past): (rows,) the end of each in (n, 2) pieces (first token, inputs). All int64.

    The last token of a document is only a label, so a document of m tokens has m - 1 inputs.
    """
    borders = file.document_start(np.arange(first, past + 1))
    inputs = np.diff(borders) - 1
    count = -(-inputs // length)
    document = np.repeat(np.arange(len(inputs)), count)
    number = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)
    starts = borders[document] + number * length
    lengths = np.minimum(length, inputs[document] - number * length)
    row_of = best_fit(lengths, length)
    in_order = np.argsort(row_of, kind="stable")
    ends = np.cumsum(np.bincount(row_of)) if len(row_of) else np.empty(0, np.int64)
    return ends, np.stack([starts[in_order], lengths[in_order]], axis=1)


def _begun(file: IndexedFile, position: int) -> int:
    """How many documents begin before a token position."""
    return int(file.documents_until(np.array([position - 1]))[0])


def _name(shard: Shard, first: int, past: int) -> str:
    return f"{Path(shard.prefix).name}.{shard.sha256['.idx'][:12]}.{first}-{past}.rows"


def _load(path: Path) -> tuple[np.ndarray, np.ndarray]:
    table = np.frombuffer(map_file(path), "<i8")
    rows = int(table[0]) if len(table) else 0
    ends, pieces = table[1 : rows + 1], table[rows + 1 :]
    if len(ends) != rows or len(pieces) != 2 * (int(ends[-1]) if rows else 0):
        raise damaged(path, "is cut off")
    return ends, pieces.reshape(-1, 2)
