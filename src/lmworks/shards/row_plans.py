"""Best-fit packing: whole pieces of text are packed into rows of one length, with little padding (Ding et al. 2024, arXiv:2404.10830).

Row plans: which documents share a row, stored once per shard and sequence length (`shards.packing: best_fit`).

The packing of a shard follows from the lengths of its documents alone: documents longer than a row are cut into whole rows and a rest,
the rests and the others are packed by best-fit decreasing (`lmworks.shards.row_plans`). It is written to `packing/LENGTH/` below the
shards and read through a memory map, so that the batch of any step is found at once, in memory that does not grow. Rows never
reach beyond a shard. A document belongs to the phase in whose range it begins, so that none is read by two.

What each packing costs: documents that are cut, and tokens that are padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lmworks.host.pool import map_unordered
from lmworks.io.files import atomic_path, read_json, write_json
from lmworks.shards.batch import IGNORE, PADDING, fill_padding
from lmworks.shards.indexed import IndexedFile, damaged, map_file
from lmworks.shards.manifest import Manifest, Shard
from lmworks.shards.token_stream import TokenStream
from lmworks.ui.terminal import bar


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece, (n,) int64: the longest first, each into the fullest row that still has room.

    Rows are renumbered in the order of their first piece, so that the result follows the order of the pieces.
    """
    lengths = np.asarray(lengths, np.int64)
    assert lengths.size == 0 or (lengths.min() > 0 and lengths.max() <= capacity), "pieces have from 1 to `capacity` tokens"
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    present = 0  # bit r is set when some row has exactly r free places
    row_of, rows = np.empty(len(lengths), np.int64), 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        need = int(lengths[piece])
        fitting = present >> need
        if fitting:
            room = need + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                present &= ~(1 << room)
        else:
            room, row, rows = capacity, rows, rows + 1
        row_of[piece] = row
        if room > need:
            with_room[room - need].append(row)
            present |= 1 << (room - need)
    _, first, inverse = np.unique(row_of, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first, kind="stable"), kind="stable")[inverse]


@dataclass(frozen=True)
class Pieces:
    """Pieces of text that are never split: first token and number of inputs, (n,) int64. The label of the last input is the next token."""

    starts: np.ndarray
    lengths: np.ndarray


class PackedRows:
    """Pieces of a source, packed into rows of `length` inputs. The unused end of a row is padding, as a document of its own."""

    def __init__(self, source: TokenStream | IndexedFile, pieces: Pieces, length: int) -> None:
        self.length, self._source, self._pieces = length, source, pieces
        row_of = best_fit(pieces.lengths, length)
        self._order = np.argsort(row_of, kind="stable")
        self._ends = np.cumsum(np.bincount(row_of)) if len(row_of) else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def pieces(self, row: int) -> np.ndarray:
        """The pieces in a row, in their order."""
        return self._order[self._ends[row - 1] if row else 0 : self._ends[row]]

    def fill(self, row: int, tokens: np.ndarray, labels: np.ndarray) -> list[int]:
        """Write a row into `tokens` and `labels`, both (length,); returns where its segments begin, the padding's included."""
        tokens[:], labels[:] = PADDING, IGNORE
        begins, at = [], 0
        for piece in self.pieces(row).tolist():
            start, count = int(self._pieces.starts[piece]), int(self._pieces.lengths[piece])
            text, learn = self._read(start, count + 1)
            tokens[at : at + count] = text[:-1]
            labels[at : at + count] = text[1:] if learn is None else np.where(learn[1:] != 0, text[1:].astype(np.int32), IGNORE)
            begins.append(at)
            at += count
        fill_padding(tokens, at)
        return [*begins, at] if at < self.length else begins

    def _read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        if isinstance(self._source, IndexedFile):
            mask = self._source.mask
            return self._source.tokens[start : start + count], None if mask is None else mask[start : start + count]
        out = np.empty((1, count), np.int32)
        self._source.gather(np.array([start]), count, out)
        return out[0], None


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


_SAMPLED = 100_000  # documents of a shard that are packed for the estimate


@dataclass(frozen=True)
class Waste:
    """The cost of each packing, on a sample of documents.

    cut: share of the documents that fit into a sequence and are cut by `concatenate` (by `best_fit` none is).
    padding: share of the tokens of a batch that `best_fit` leaves empty (`concatenate` none).
    """

    documents: int
    cut: float
    padding: float


def waste(file: IndexedFile, length: int, most: int = _SAMPLED) -> Waste:
    """Both packings of the first documents of a shard, in sequences of `length` tokens."""
    count = min(most, file.documents)
    borders = file.document_start(np.arange(count + 1))
    inputs = np.diff(borders) - 1
    fits = (inputs >= 1) & (inputs <= length)
    cut = fits & (borders[:-1] // length != (borders[1:] - 2) // length)
    ends, _ = pack(file, 0, count, length)
    return Waste(count, float(cut.sum() / max(1, fits.sum())), float(1 - inputs.sum() / max(1, len(ends) * length)))
