"""The held-out documents that the model never trained on, by domain, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lmworks.documents import corpus_files
from lmworks.errors import UserError


def _files(corpus_dir: Path, split: str) -> list[Path]:
    files = [path for parts in corpus_files(corpus_dir, split).values() for path in parts]
    if not files:
        raise UserError(f"{corpus_dir / split} holds no .parquet file: run the corpus stage first (lmworks run RECIPE)")
    return files


def held_out(corpus_dir: Path) -> dict[str, list[str]]:
    """Domain -> texts of `corpus_dir/validation`, domains and files by name, documents in the file's order. Empty ones are left out."""
    import pyarrow.parquet as pq

    texts: dict[str, list[str]] = {}
    for file in _files(corpus_dir, "validation"):
        table = pq.read_table(file, columns=["text", "domain"])
        for text, domain in zip(table["text"].to_pylist(), table["domain"].to_pylist(), strict=True):
            if text:
                texts.setdefault(domain, []).append(text)
    if not texts:
        raise UserError(f"{corpus_dir / 'validation'} holds no documents: raise corpus.validation_fraction or add text")
    return dict(sorted(texts.items()))


def training_texts(corpus_dir: Path, batch_rows: int = 1024) -> Iterator[str]:
    """The training split, document by document, in constant memory."""
    import pyarrow.parquet as pq

    for file in _files(corpus_dir, "train"):
        for batch in pq.ParquetFile(file).iter_batches(batch_rows, columns=["text"]):
            yield from batch.column(0).to_pylist()
