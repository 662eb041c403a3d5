"""What stays of each document for comparing it with all others: keys of its text and address, and its sketch. One Arrow file per part,
memory-mapped, so that memory grows with what is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from lmworks.corpus.dedup.keys import text_keys, url_keys
from lmworks.corpus.dedup.sketch import Sketching, band_keys, sketches
from lmworks.corpus.document import Document
from lmworks.corpus.semantic import Embed
from lmworks.corpus.units import Units
from lmworks.files import atomic_path
from lmworks.recipe.corpus import Source
from lmworks.recipe.dedup import Dedup


def sketching_of(dedup: Dedup, sources: Sequence[Source]) -> Sketching | None:
    """How the documents of a recipe are sketched (None: not at all); its bands serve the lowest threshold of any source."""
    if dedup.minhash is None:
        return None
    own = [source.dedup.threshold for source in sources if source.dedup.minhash and source.dedup.threshold is not None]
    node = dedup.minhash
    return Sketching.of(node.ngram, node.permutations, node.bands, min([node.threshold, *own]))


class TracesWriter:
    """Collects the traces of one part, batch by batch; `close` writes them."""

    def __init__(self, sketching: Sketching | None, embed: Embed | None = None) -> None:
        self._sketching, self._embed = sketching, embed
        self._vectors: list[np.ndarray] = []
        self._texts: list[np.ndarray] = [np.zeros((0, 2), dtype=np.uint64)]
        self._urls: list[np.ndarray] = [np.zeros((0, 2), dtype=np.uint64)]
        self._sketches: list[np.ndarray] = [np.zeros((0, sketching.values if sketching else 0), dtype=np.uint8)]

    def add(self, documents: Sequence[Document], units: Units) -> None:
        """Documents in the order in which they are staged, with the units of their texts."""
        self._texts.append(text_keys([document.text for document in documents]))
        self._urls.append(url_keys([str(document.facts.get("url", "")) for document in documents]))
        if self._sketching:
            self._sketches.append(sketches(units, self._sketching))
        if self._embed:
            self._vectors.append(self._embed(documents, units))

    def close(self, path: Path) -> None:
        """Write the file, whole or not at all; the same documents give the same bytes."""
        table = np.concatenate(self._sketches)
        columns = {
            "text": _binary(np.concatenate(self._texts)),
            "url": _binary(np.concatenate(self._urls)),
        }
        if self._sketching:
            columns["sketch"] = _binary(table)
            columns |= {f"band{band}": pa.array(keys) for band, keys in enumerate(band_keys(table, self._sketching))}
        if self._vectors:
            columns["vector"] = _binary(np.concatenate(self._vectors))
        rows = pa.table(columns)
        with atomic_path(path) as aside, pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as out:
            out.write_table(rows, max_chunksize=max(rows.num_rows, 1))


@dataclass(frozen=True)
class Traces:
    """The traces of one part of a source. Small to send to another process: columns are mapped when they are asked for."""

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
    """Each row of numbers as one value of fixed size."""
    data = np.ascontiguousarray(rows)
    width = data.dtype.itemsize * data.shape[1]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(data), [None, pa.py_buffer(data.tobytes())])
