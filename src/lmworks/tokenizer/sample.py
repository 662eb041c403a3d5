"""A sample of the corpus in the proportions of the training mixture."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from lmworks.documents import corpus_files
from lmworks.errors import UserError
from lmworks.recipe.recipe import Recipe


def source_weights(recipe: Recipe, corpus_dir: Path) -> dict[str, float]:
    """The share of each source that has text in `corpus_dir`/train, over all phases by their tokens; equal shares without phases."""
    available = corpus_files(corpus_dir, "train")
    if not available:
        raise UserError(f"{Path(corpus_dir) / 'train'} has no .parquet files; run `lmworks corpus build RECIPE` first")
    weights: dict[str, float] = {}
    for phase in recipe.train.phases:
        for source, weight in phase.mixture.items():
            if source in available:
                weights[source] = weights.get(source, 0.0) + weight * phase.tokens
    weights = weights or dict.fromkeys(sorted(available), 1.0)
    total = sum(weights.values())
    return {source: weights[source] / total for source in sorted(weights)}


def draw(corpus_dir: Path, weights: dict[str, float], size: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield (source, text) until `size` bytes of UTF-8, each source its share; what a short source lacks, the others give.

    The same documents in the same order for the same arguments. Memory holds one row group of each source.
    """
    files = corpus_files(corpus_dir, "train")
    streams = {source: _documents(files[source], source, seed) for source in weights}
    left = size
    while streams and left > 0:
        total = sum(weights[source] for source in streams)
        shares = {source: max(1, int(left * weights[source] / total)) for source in streams}
        for source, share in shares.items():
            while share > 0:
                text = next(streams[source], None)
                if text is None:
                    del streams[source]
                    break
                data = text.encode("utf-8", errors="replace")[:share]  # exact, so one long document cannot crowd out other sources
                share -= len(data)
                left -= len(data)
                yield source, data.decode("utf-8", errors="ignore")


def _documents(paths: list[Path], source: str, seed: int) -> Iterator[str]:
    """All texts of a source, row groups and rows in an order keyed by the seed (hashes, so that it never changes with a library)."""
    groups = [(path, group) for path in paths for group in range(pq.read_metadata(path).num_row_groups)]
    for number in _shuffled(len(groups), f"{seed}/{source}"):
        path, group = groups[number]
        with pq.ParquetFile(path) as file:
            texts = file.read_row_group(group, columns=["text"]).column("text")
        for row in _shuffled(len(texts), f"{seed}/{source}/{number}"):
            yield texts[row].as_py()


def _shuffled(count: int, key: str) -> list[int]:
    return sorted(range(count), key=lambda index: hashlib.blake2b(f"{key}/{index}".encode(), digest_size=8).digest())
