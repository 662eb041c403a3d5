"""The documents of a source as an array of 50 bytes per document, for comparing two corpora."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lmworks.corpus.analysis.prepared import PreparedCorpus
from lmworks.corpus.document import MOST_VARIANTS, split_id, variant_id
from lmworks.corpus.engine.job import Piece
from lmworks.corpus.units import mix

RECORD = np.dtype(
    [
        ("origin", "<u8"),
        ("text", "<u8"),  # hash of the text in the corpus; 0 where the document was not kept
        ("part", "<u4"),
        ("number", "<u8"),
        ("bytes", "<i8"),
        ("source", "<u2"),
        ("fate", "<u2"),
        ("output", "<u2"),
    ]
)
UNREAD = "not read"
_ODD = np.uint64(0x9E3779B97F4A7C15)


class NameNumbers:
    """Numbers the names of sources, fates (with reasons) and outputs; 0 means none."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, int]] = {column: {UNREAD: 0} for column in ("source", "fate", "output")}
        self._names: dict[str, list[str]] = {column: [UNREAD] for column in self._numbers}

    def number(self, column: str, name: str) -> int:
        """The number of a name; a new name gets the next number."""
        numbers, names = self._numbers[column], self._names[column]
        if name not in numbers:
            numbers[name] = len(names)
            names.append(name)
        return numbers[name]

    def source(self, name: str) -> int:
        return self.number("source", name)

    def name(self, column: str, number: int) -> str:
        return self._names[column][number]


@dataclass(frozen=True)
class Records:
    """Rows of `RECORD`. `keys` (N,) uint64 identify documents of one source by their origins; documents with equal origins are numbered."""

    rows: np.ndarray
    keys: np.ndarray

    def take(self, places: np.ndarray) -> Records:
        return Records(self.rows[places], self.keys[places])

    def without(self, places: np.ndarray) -> Records:
        left = np.ones(len(self.rows), dtype=bool)
        left[places] = False
        return self.take(np.flatnonzero(left))

    def kept_places(self) -> np.ndarray:
        return np.flatnonzero(self.rows["text"])

    def kept(self) -> Records:
        return self.take(self.kept_places())

    def of(self, source: int) -> Records:
        return self.take(np.flatnonzero(self.rows["source"] == source))

    def texts_at_origins(self) -> np.ndarray:
        """(N,) uint64 that are equal if both text and origin are equal."""
        return mix(self.rows["text"] + self.keys * _ODD)

    def unread(self) -> Records:
        """As many records of documents that do not exist."""
        return Records(np.zeros(len(self.rows), RECORD), self.keys)

    def id(self, place: int, labels: NameNumbers) -> str:
        row = self.rows[place]
        if not row["source"]:
            return UNREAD
        number, variant = divmod(int(row["number"]), MOST_VARIANTS + 1)
        return variant_id(f"{labels.name('source', row['source'])}/{row['part']}/{number}", variant)

    @classmethod
    def joined(cls, parts: Iterable[Records]) -> Records:
        parts = list(parts)
        rows = np.concatenate([np.zeros(0, RECORD), *(part.rows for part in parts)])
        return cls(rows, np.concatenate([np.zeros(0, np.uint64), *(part.keys for part in parts)]))


def load_records(corpus: PreparedCorpus, name: str, labels: NameNumbers, advance: Callable[[], None]) -> Records:
    """The documents of a source; empty if the corpus has no such source. `advance` is called after each part."""
    parts = []
    for piece in corpus.pieces:
        if piece.source.name == name:
            parts.append(_of_piece(corpus, piece, labels))
            advance()
    rows = np.concatenate([np.zeros(0, RECORD), *parts])
    return Records(rows, number_repeats(rows["origin"]))


def _of_piece(corpus: PreparedCorpus, piece: Piece, labels: NameNumbers) -> np.ndarray:
    parts = []
    for _, table in corpus.decisions(piece, ("id", "origin", "bytes", "fate", "reason")):
        rows = np.zeros(table.num_rows, RECORD)
        fates = zip(table["fate"].to_pylist(), table["reason"].to_pylist(), strict=True)
        rows["origin"] = _hashes(table["origin"].to_pylist())
        rows["number"] = _numbers(table["id"].to_pylist())
        rows["bytes"] = table["bytes"].to_numpy()
        rows["fate"] = [labels.number("fate", f"{fate} {reason}".strip()) for fate, reason in fates]
        parts.append(rows)
    rows = np.concatenate([np.zeros(0, RECORD), *parts])
    rows["part"], rows["source"] = piece.number, labels.source(piece.source.name)
    for path, _, table in corpus.kept(piece):
        numbers = np.array(_numbers(table["id"].to_pylist()), dtype=np.uint64)
        places = np.searchsorted(rows["number"], numbers)  # documents are in the order they were read
        rows["text"][places] = np.maximum(_hashes(table["text"].to_pylist()), np.uint64(1))
        rows["output"][places] = labels.number("output", f"{path.parent.parent.name}/{path.parent.name}")
    return rows


def _numbers(ids: Sequence[str]) -> list[int]:
    """The number of each document in its part, combined with the number of its variant."""
    return [number * (MOST_VARIANTS + 1) + variant for _, _, number, variant in map(split_id, ids)]


def _hashes(texts: Sequence[str]) -> np.ndarray:
    digests = b"".join(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype="<u8")


def number_repeats(hashes: np.ndarray) -> np.ndarray:
    """(N,) unique uint64: each hash, mixed with the number of equal hashes before it."""
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    first = np.searchsorted(ranked, ranked)
    found = np.empty(len(hashes), dtype=np.uint64)
    found[order] = ranked + (np.arange(len(hashes)) - first).astype(np.uint64) * _ODD
    return mix(found)
