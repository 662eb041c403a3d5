"""Corpus files as the corpus stage writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def write_corpus(folder: Path, split: str, source: str, texts: Sequence[str], domain: str) -> Path:
    """The only part of a source, in the format of the corpus stage."""
    path = folder / split / source / "00000.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    count = len(texts)
    table = {
        "id": [f"{source}/0/{number}" for number in range(count)],
        "text": list(texts),
        "source": [source] * count,
        "domain": [domain] * count,
        "language": ["en"] * count,
        "origin": [f"{source}.txt:{number}" for number in range(count)],
    }
    pq.write_table(pa.table(table), path)
    return path
