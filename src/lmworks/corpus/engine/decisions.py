"""The files of a job: parquet tables of documents and decisions, and arrays. Equal rows give equal bytes.

The decision about each document of a part: one row each, filled in as the document passes the steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lmworks.corpus.document import Document, Fact, split_id
from lmworks.io.files import atomic_path
from lmworks.io.run_layout import COLUMNS

DOCUMENTS = pa.schema([(name, pa.string()) for name in COLUMNS])
DECISIONS = pa.schema(
    [
        ("id", pa.string()),
        ("origin", pa.string()),
        ("bytes", pa.int64()),
        ("language", pa.string()),
        ("fate", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("copy_of", pa.string()),
        ("variant_of", pa.string()),
    ]
)
"""One row per document that was read, in order, followed by its variants; statistics of the steps are further float64 columns.

`bytes` is the size that was read. `fate` is `train`, `validation`, `quarantine`, `max_bytes`, or the step or pass that dropped it.
"""


@contextmanager
def parquet_writer(path: Path, schema: pa.Schema = DOCUMENTS) -> Iterator[pq.ParquetWriter]:
    """Write a parquet file, atomically."""
    dictionaries = [name for name in ("source", "domain", "language", "fate", "reason") if name in schema.names]
    with (
        atomic_path(path) as aside,
        pq.ParquetWriter(
            aside, schema, compression="zstd", compression_level=1, write_statistics=False, use_dictionary=dictionaries
        ) as out,
    ):
        yield out


def save_array(path: Path, rows: np.ndarray) -> None:
    """Write an array, atomically."""
    with atomic_path(path) as aside, open(aside, "wb") as handle:
        np.save(handle, rows, allow_pickle=False)


def rows_of(documents: Sequence[Document]) -> pa.RecordBatch:
    """Documents as rows of `DOCUMENTS`."""
    columns = [[getattr(document, name) for document in documents] for name in COLUMNS[:-1]]
    facts = [json.dumps(dict(document.facts), ensure_ascii=False, sort_keys=True) for document in documents]
    return pa.record_batch([pa.array(column, pa.string()) for column in (*columns, facts)], schema=DOCUMENTS)


def row_groups(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, pa.Table]]:
    """(number of the first row, rows), one row group at a time."""
    first = 0
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            rows = file.read_row_group(group, columns=columns)
            yield first, rows
            first += rows.num_rows


UNDECIDED = ""
"""The fate of a document that no step has dropped; later passes decide about it."""


class DecisionRows:
    """Rows of `tables.DECISIONS` with a column for each of `statistics`, the numbers that steps measure."""

    def __init__(self, statistics: Sequence[str]) -> None:
        self.schema = pa.schema([*DECISIONS, *((name, pa.float64()) for name in statistics)])
        self._statistics = statistics
        self._reset()

    def _reset(self) -> None:
        self._places: dict[str, int] = {}
        self._rows: list[list[Any]] = []
        self._measured: dict[str, dict[int, float]] = {}
        self._sorted = True  # by id; variants break the order

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, identity: str, origin: str, size: int, language: str, fate: str = UNDECIDED, reason: str = "") -> None:
        """Add the next document that was read."""
        if fate == UNDECIDED:
            self._places[identity] = len(self._rows)
        self._rows.append([identity, origin, size, language, fate, reason, "", "", ""])

    def add_variant(self, identity: str, original: str, size: int) -> None:
        """Add a variant of `original`; the measurements of the original apply to it, too."""
        place = self._places[original]
        self._places[identity] = len(self._rows)
        _, origin, _, language, *_ = self._rows[place]
        self._rows.append([identity, origin, size, language, UNDECIDED, "", "", "", original])
        for of in self._measured.values():
            if place in of:
                of[self._places[identity]] = of[place]
        self._sorted = False

    def drop(self, identity: str, step: str, reason: str, detail: str) -> None:
        """Record that a step dropped the document."""
        self._rows[self._places.pop(identity)][4:7] = step, reason, detail

    def keep(self, identity: str, language: str) -> None:
        """Record that the document passed all steps, with its language."""
        self._rows[self._places[identity]][3] = language

    def measure(self, identity: str, facts: Mapping[str, Fact], names: Sequence[str]) -> None:
        """Record the statistics among the facts of a document."""
        for name in names:
            value = facts.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                self._measured.setdefault(name, {})[self._places[identity]] = float(value)

    def write(self, out: pq.ParquetWriter) -> None:
        """Write the rows, whose documents have passed all steps, and clear them."""
        order = list(range(len(self._rows)))
        if not self._sorted:
            order.sort(key=lambda place: split_id(self._rows[place][0]))
        rows = [self._rows[place] for place in order]
        columns = [pa.array(column, field.type) for column, field in zip(_columns(rows), DECISIONS, strict=True)]
        for name in self._statistics:
            values = self._measured.get(name, {})
            columns.append(pa.array([values.get(place) for place in order], pa.float64()))
        out.write_table(pa.table(columns, schema=self.schema))
        self._reset()


def _columns(rows: list[list[Any]]) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True)) if rows else [() for _ in DECISIONS]
