"""A sample of the corpus in the proportions of the training mixture, with balanced languages."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from lmworks.documents import corpus_files
from lmworks.errors import UserError
from lmworks.recipe.derivation.buckets import expand
from lmworks.recipe.schema.recipe import Recipe

Shares = dict[tuple[str, str], float]  # (source, language) -> share of the sample's bytes
_SAMPLED = 64  # row groups of a source from which its languages are estimated


def source_weights(recipe: Recipe, corpus_dir: Path, leave_out: Collection[str] = ()) -> dict[str, float]:
    """The weight of each output that has text in `corpus_dir`/train, over all phases by their tokens; equal weights without phases.

    Sources in `leave_out` are excluded. Raises `UserError` if one of them does not exist, or if no source is left.
    """
    available = corpus_files(corpus_dir, "train")
    for name in leave_out:
        if name not in available:
            raise UserError(f"{Path(corpus_dir) / 'train'} has no source {name}; it has {', '.join(available) or 'none'}")
        del available[name]
    if leave_out and not available:
        raise UserError("every source is left out; leave one to train a tokenizer on")
    if not available:
        raise UserError(f"{Path(corpus_dir) / 'train'} has no .parquet files; run `lmworks corpus prepare RECIPE` first")
    sizes = {output: sum(path.stat().st_size for path in paths) for output, paths in available.items()}
    weights: dict[str, float] = {}
    for phase in recipe.train.phases:
        for source, weight in expand(phase.mixture, recipe.corpus.sources, sizes).items():
            if source in available:
                weights[source] = weights.get(source, 0.0) + weight * phase.tokens
    weights = weights or dict.fromkeys(sorted(available), 1.0)
    total = sum(weights.values())
    return {source: weights[source] / total for source in sorted(weights)}


def shares(corpus_dir: Path, weights: Mapping[str, float], balance: float, seed: int) -> Shares:
    """The share of each language of each source, from the sources' `weights`.

    Languages are drawn in proportion to their bytes to the power of `balance` (arXiv:1901.07291): 1 leaves the mixture as it is, 0
    gives every language the same share. Code keeps its share: it does not compete with natural languages.
    """
    files = corpus_files(corpus_dir, "train")
    found: Shares = {}
    for source, weight in weights.items():
        sizes = _languages(files[source], source, seed)
        found |= {(source, language): weight * size / sizes.total() for language, size in sorted(sizes.items()) if size}
    by_language: dict[str, float] = {}
    for (_, language), share in found.items():
        by_language[language] = by_language.get(language, 0.0) + share
    by_language.pop("code", None)
    flat = {language: share**balance for language, share in by_language.items()}
    scale = sum(by_language.values()) / sum(flat.values()) if flat else 1.0
    factor = {language: scale * flat[language] / by_language[language] for language in flat}
    return {key: share * factor.get(key[1], 1.0) for key, share in found.items()}


def _languages(paths: list[Path], source: str, seed: int) -> Counter[str]:
    """Bytes of each language in the first row groups, in the order in which `draw` reads them."""
    sizes: Counter[str] = Counter()
    for file, group, _ in islice(_row_groups(paths, source, seed), _SAMPLED):
        rows = file.read_row_group(group, columns=["text", "language"])
        lengths = pc.binary_length(rows.column("text"))
        for language, size in zip(rows.column("language").to_pylist(), lengths.to_pylist(), strict=True):
            sizes[language] += size
    return sizes


def text_bytes(corpus_dir: Path, sources: Collection[str]) -> int:
    """Bytes of text in these outputs, by the statistics in the files."""
    size = 0
    for path in (path for source, paths in corpus_files(corpus_dir, "train").items() if source in sources for path in paths):
        metadata = pq.read_metadata(path)
        column = metadata.schema.names.index("text")
        size += sum(metadata.row_group(group).column(column).total_uncompressed_size for group in range(metadata.num_row_groups))
    return size


def draw(corpus_dir: Path, wanted: Shares, size: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield (source, language, text) up to `size` bytes of UTF-8, in proportion to the shares.

    If a source or language is exhausted, the others fill its share. Equal arguments give the same documents in the same order. Memory holds
    one row group for each source and language.
    """
    files = corpus_files(corpus_dir, "train")
    streams = {(source, language): _documents(files[source], source, language, seed) for source, language in wanted}
    left = size
    while streams and left > 0:
        total = sum(wanted[key] for key in streams)
        due = {key: max(1, int(left * wanted[key] / total)) for key in streams}
        for key, share in due.items():
            while share > 0:
                text = next(streams[key], None)
                if text is None:
                    del streams[key]
                    break
                data = text.encode("utf-8", errors="replace")[:share]  # exact, so one long document cannot crowd out other sources
                share -= len(data)
                left -= len(data)
                yield *key, data.decode("utf-8", errors="ignore")


def _documents(paths: list[Path], source: str, language: str, seed: int) -> Iterator[str]:
    """The texts of one language in a source, rows in an order keyed by the seed."""
    for file, group, key in _row_groups(paths, source, seed):
        languages = file.read_row_group(group, columns=["language"]).column("language").to_pylist()
        if language in languages:
            texts = file.read_row_group(group, columns=["text"]).column("text")
            for row in _shuffled(len(texts), key):
                if languages[row] == language:
                    yield texts[row].as_py()


def _row_groups(paths: list[Path], source: str, seed: int) -> Iterator[tuple[pq.ParquetFile, int, str]]:
    """Row groups of all parts in an order keyed by the seed, each with a key. Hashes are used because they do not change with library
    versions.
    """
    for part in _shuffled(len(paths), f"{seed}/{source}/parts"):
        with pq.ParquetFile(paths[part]) as file:
            for group in _shuffled(file.num_row_groups, f"{seed}/{source}/{part}"):
                yield file, group, f"{seed}/{source}/{part}/{group}"


def _shuffled(count: int, key: str) -> list[int]:
    return sorted(range(count), key=lambda index: hashlib.blake2b(f"{key}/{index}".encode(), digest_size=8).digest())
