"""Signatures: the data by which documents are compared with each other (keys of text and URL, and the sketch). One Arrow file per part,
memory-mapped, so that only the data in use takes memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa

from lmworks.corpus.dedup.keys import text_keys, url_keys
from lmworks.corpus.dedup.semantic import Embed
from lmworks.corpus.dedup.sketch import Sketching, band_keys, sketches
from lmworks.corpus.document import Batch
from lmworks.files import atomic_path, explain_os_errors
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.schema.dedup import Dedup

_ROWS = 1 << 14  # whose band keys are computed at one time


def sketching_of(dedup: Dedup, sources: Sequence[Source]) -> Sketching | None:
    """The sketch parameters of a recipe (None without MinHash); the bands suit the lowest threshold of any source."""
    if dedup.minhash is None:
        return None
    own = [source.dedup.threshold for source in sources if source.dedup.minhash and source.dedup.threshold is not None]
    node = dedup.minhash
    return Sketching.of(node.ngram, node.permutations, node.bands, min([node.threshold, *own]))


class _Column:
    """Rows of numbers that are collected in a file, so that memory does not grow with them."""

    def __init__(self, folder: Path, dtype: Any, width: int) -> None:
        self._folder, self._dtype, self._width = folder, np.dtype(dtype), width
        with explain_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = TemporaryFile(dir=folder)  # noqa: SIM115

    def add(self, rows: np.ndarray) -> None:
        """(N, width) or, for width 1, (N,)."""
        with explain_os_errors(self._folder):
            self._file.write(np.ascontiguousarray(rows, dtype=self._dtype).tobytes())

    def rows(self) -> np.ndarray:
        """(N, width) all rows, memory-mapped."""
        with explain_os_errors(self._folder):
            self._file.flush()
        empty = not os.fstat(self._file.fileno()).st_size
        data = np.zeros(0, self._dtype) if empty else np.memmap(self._file, self._dtype, mode="r")
        return data.reshape(-1 if self._width else 0, self._width)


class SignatureWriter:
    """Collects the signatures of one part, batch by batch, in unnamed files in `folder`; `close` writes the result."""

    def __init__(self, folder: Path, sketching: Sketching | None, embed: Embed | None = None) -> None:
        self._folder, self._sketching, self._embed = folder, sketching, embed
        self._vectors: _Column | None = None
        self._texts, self._urls = _Column(folder, np.uint64, 2), _Column(folder, np.uint64, 2)
        self._sketches = _Column(folder, np.uint8, sketching.values if sketching else 0)

    def add(self, batch: Batch) -> None:
        """Add documents in the order in which they are staged."""
        documents = batch.documents
        self._texts.add(text_keys([document.text for document in documents]))
        self._urls.add(url_keys([str(document.facts.get("url", "")) for document in documents]))
        if self._sketching:
            self._sketches.add(sketches(batch.compared, self._sketching))
        if self._embed:
            vectors = self._embed(documents, batch.units)
            self._vectors = self._vectors or _Column(self._folder, vectors.dtype, vectors.shape[1])
            self._vectors.add(vectors)

    def close(self, path: Path) -> None:
        """Write the file atomically; equal documents give equal bytes."""
        columns = {"text": _binary(self._texts.rows()), "url": _binary(self._urls.rows())}
        if self._sketching:
            table = self._sketches.rows()
            columns["sketch"] = _binary(table)
            bands = [_Column(self._folder, np.uint64, 1) for _ in range(self._sketching.bands)]
            for first in range(0, len(table), _ROWS):
                for band, keys in zip(bands, band_keys(table[first : first + _ROWS], self._sketching), strict=True):
                    band.add(keys)
            for number, band in enumerate(bands):
                keys = band.rows()
                columns[f"band{number}"] = pa.Array.from_buffers(pa.uint64(), len(keys), [None, pa.py_buffer(keys)])
        if self._vectors:
            columns["vector"] = _binary(self._vectors.rows())
        rows = pa.table(columns)
        with atomic_path(path) as aside, pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as out:
            out.write_table(rows, max_chunksize=max(rows.num_rows, 1))


@dataclass(frozen=True)
class Signatures:
    """The signatures of one part of a source. Cheap to send to another process: columns are mapped on first use."""

    path: Path
    source: Source

    @cached_property
    def _table(self) -> pa.Table:
        return pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "source": self.source}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def texts(self) -> np.ndarray:
        """(D, 2) uint64"""
        return self._column("text", np.uint64)

    @property
    def urls(self) -> np.ndarray:
        """(D, 2) uint64"""
        return self._column("url", np.uint64)

    @property
    def sketches(self) -> np.ndarray:
        """(D, values) uint8"""
        return self._column("sketch", np.uint8)

    def band(self, number: int) -> np.ndarray:
        """(D,) uint64 keys of one band."""
        return self._column(f"band{number}", np.uint64)[:, 0]

    @property
    def vectors(self) -> np.ndarray:
        """(D, dimensions) float16"""
        return self._column("vector", np.float16) if len(self) else np.zeros((0, 0), np.float16)

    def _column(self, name: str, dtype: type[np.generic]) -> np.ndarray:
        column = self._table.column(name)
        if not column.num_chunks or not len(column):
            return np.zeros((0, 1 if name.startswith("band") else 2), dtype=dtype)
        data = np.frombuffer(column.chunk(0).buffers()[1], dtype=dtype)
        return data.reshape(len(column), -1)[: len(column)]


def _binary(rows: np.ndarray) -> pa.Array:
    """Each row of numbers as one fixed-size binary value."""
    width = rows.dtype.itemsize * rows.shape[1]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(rows), [None, pa.py_buffer(rows)])
