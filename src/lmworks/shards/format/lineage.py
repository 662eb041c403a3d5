"""Lineage: the document, raw file and row that each token comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.errors import UserError
from lmworks.shards.format.indexed import with_ending

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
