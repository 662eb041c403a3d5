"""The files of a job: parquet tables of documents and decisions, and arrays. Equal rows give equal bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lmworks.corpus.document import Document
from lmworks.documents import COLUMNS
from lmworks.files import atomic_path

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
