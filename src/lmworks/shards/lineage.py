"""Lineage: the document, raw file and row that each token comes from.

Finding the tokens of a document, and the document of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lmworks.errors import UserError
from lmworks.shards.indexed import with_ending
from lmworks.shards.manifest import Manifest, SplitName
from lmworks.shards.remote import ShardFiles
from lmworks.ui.terminal import bar

if TYPE_CHECKING:
    import pyarrow.parquet as pq


ENDING = ".lineage.parquet"
ROWS_PER_GROUP = 16_384  # one group is read to show one document


@dataclass(frozen=True)
class DocumentSpan:
    """Tokens [start, stop) of a document; `origin` is the file and row it was read from."""

    id: str
    origin: str
    start: int
    stop: int


@dataclass(frozen=True)
class SequenceDocuments:
    """The documents of one sequence. `number` counts the sequences of its phase; `sequence` is its index within the phase's range."""

    number: int
    source: str
    epoch: int
    sequence: int
    documents: list[DocumentSpan]


class Lineage:
    """The table beside a shard: one row per document with id, origin, tokens, bytes, domain, language."""

    def __init__(self, prefix: Path) -> None:
        self._path = with_ending(Path(prefix), ENDING)
        self._file: pq.ParquetFile | None = None
        self._group = -1
        self._rows: list[dict[str, Any]] = []

    def row(self, document: int) -> dict[str, Any]:
        """The row of a document of the shard."""
        group, row = divmod(document, ROWS_PER_GROUP)
        if group != self._group:
            self._file = self._file or open_lineage(self._path)
            self._group, self._rows = group, self._file.read_row_group(group).to_pylist()
        return self._rows[row]

    def span(self, document: int, start: int, stop: int) -> DocumentSpan:
        found = self.row(document)
        return DocumentSpan(found["id"], found["origin"], start, stop)


def open_lineage(path: Path) -> pq.ParquetFile:
    """Open the table; UserError if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read ({why}); delete the folder {path.parent} and run the same command again") from None


@dataclass(frozen=True)
class DocumentLocation:
    """A document in the shards: its number in the file `shard`, and its tokens [start, stop) in the whole of its source."""

    shard: str
    document: int
    source: str
    split: SplitName
    start: int
    stop: int


def find_document(shards_dir: Path, identity: str, source: str, split: SplitName) -> DocumentLocation | None:
    """The location of the document with id `identity` in `source`; None if it is not in the shards. Reads ids, not tokens."""
    manifest = Manifest.load(shards_dir)
    if all(one.name != source for one in manifest.sources):
        return None
    stream = manifest.stream(shards_dir, source, split, ShardFiles(shards_dir, manifest))
    with bar("find in shards", len(stream.prefixes)) as progress:
        for number, prefix in enumerate(stream.prefixes):
            document = _row_of(prefix, identity)
            if document is not None:
                begin, end = (stream.offsets[number] + stream.file(number).document_start(np.array([document, document + 1]))).tolist()
                return DocumentLocation(prefix.name, document, source, split, begin, end)
            progress.advance()
    return None


def _row_of(prefix: Path, identity: str) -> int | None:
    first = 0
    for ids in _ids(prefix):
        place: int = pc.index(ids, identity).as_py()
        if place >= 0:
            return first + place
        first += len(ids)
    return None


def _ids(prefix: Path) -> Iterator[pa.ChunkedArray]:
    with open_lineage(with_ending(prefix, ENDING)) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=["id"])["id"]


def document_at(shards_dir: Path, source: str, token: int) -> DocumentSpan:
    """The document that holds a token of a source's training text, with the token's place in it. UserError where there is no such token."""
    manifest = Manifest.load(shards_dir)
    stream = manifest.stream(shards_dir, source, open_file=ShardFiles(shards_dir, manifest))
    if not 0 <= token < len(stream):
        raise UserError(f"source {source} has {len(stream):,} tokens to train on, from 0 on; there is no token {token:,}")
    number, document, start, stop = next(stream.spans(token, token + 1))
    return Lineage(stream.prefixes[number]).span(document, start, stop)
