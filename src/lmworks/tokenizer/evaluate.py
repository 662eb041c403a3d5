"""The text that a tokenizer is trained on, and its evaluation.

The sample of the corpus has the proportions of the training mixture, with balanced languages. The evaluation gives bytes per token and
fertility (Rust et al. 2021, arXiv:2012.15613) per source and language.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lmworks.errors import UserError
from lmworks.io.run_layout import corpus_files
from lmworks.recipe.schema.corpus import expand_buckets
from lmworks.recipe.schema.recipe import Recipe
from lmworks.text.letters import words as words_of
from lmworks.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.table import Table


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
        for source, weight in expand_buckets(phase.mixture, recipe.corpus.sources, sizes).items():
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


def draw_sample(corpus_dir: Path, wanted: Shares, size: int, seed: int) -> Iterator[tuple[str, str, str]]:
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


class _Codec(Protocol):
    def encode_batch(self, texts: list[str], threads: int | None = None) -> list[np.ndarray]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class _ImportedTokenizer:
    """Any tokenizer.json, through `tokenizers`, for comparison only."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception for every error
            raise UserError(f"{path} cannot be read as a tokenizer.json: {error}") from None

    def encode_batch(self, texts: list[str], threads: int | None = None) -> list[np.ndarray]:
        return [np.array(item.ids, dtype=np.uint32) for item in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


def evaluate(tokenizers: Mapping[str, Tokenizer | Path], documents: Path, max_bytes: int = 1_000_000,
             threads: int | None = None) -> list[dict[str, Any]]:
    """Measure each tokenizer on up to `max_bytes` of each source in `documents`, the split of a corpus.

    One row per tokenizer, source and language: `bytes`, `tokens`, `bytes_per_token`, `fertility` (tokens of the whole text per
    word), `continued_words` (share of words cut into two or more tokens), `documents`, `round_trip_failures`. Words are those of UAX 29,
    with dictionaries for scripts without spaces (`lmworks.text.letters.words`); a word is encoded with the space before it, as in running
    text.
    """
    codecs: dict[str, _Codec] = {
        name: one if isinstance(one, Tokenizer) else _ImportedTokenizer(Path(one)) for name, one in tokenizers.items()
    }
    rows = []
    for paths in corpus_files(documents.parent, documents.name).values():
        for (source, domain, language), texts in sorted(_texts(paths, max_bytes).items()):
            words = Counter(
                text[start - (text[start - 1 : start] == " ") : end] for text in texts for start, end in words_of(text, language)
            )
            for name, codec in codecs.items():
                measured = _measure(codec, texts, words, threads)
                rows.append({"tokenizer": name, "source": source, "domain": domain, "language": language, **measured})
    return rows


def _measure(codec: _Codec, texts: list[str], words: Counter[str], threads: int | None) -> dict[str, Any]:
    encoded = codec.encode_batch(texts, threads)
    size, tokens = sum(len(text.encode()) for text in texts), sum(map(len, encoded))
    cut = sum(count for ids, count in zip(codec.encode_batch(list(words), 1), words.values(), strict=True) if len(ids) > 1)
    total = words.total()
    return {"documents": len(texts), "bytes": size, "tokens": tokens, "bytes_per_token": size / tokens if tokens else 0.0,
            "fertility": tokens / total if total else 0.0, "continued_words": cut / total if total else 0.0,
            "round_trip_failures": sum(codec.decode(ids) != text for ids, text in zip(encoded, texts, strict=True))}


def _texts(paths: list[Path], max_bytes: int) -> dict[tuple[str, str, str], list[str]]:
    found: dict[tuple[str, str, str], list[str]] = {}
    left: dict[tuple[str, str, str], int] = {}
    for row in (row for path in paths for row in _rows(path)):
        key = (row["source"], row["domain"], row["language"])
        if left.setdefault(key, max_bytes) > 0 and row["text"]:
            found.setdefault(key, []).append(row["text"])
            left[key] -= len(row["text"].encode())
    return found


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["text", "source", "domain", "language"]):
            yield from batch.to_pylist()


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows of `evaluate` for the terminal."""
    from rich.table import Table

    shown = Table(title="Tokenizer on held-out text")
    for column in ("tokenizer", "source", "domain", "language"):
        shown.add_column(column)
    for column in ("bytes/token", "tokens/word", "words cut", "round trip"):
        shown.add_column(column, justify="right")
    for row in rows:
        trip = "exact" if not row["round_trip_failures"] else f"{row['round_trip_failures']} of {row['documents']} lost"
        shown.add_row(row["tokenizer"], row["source"], row["domain"], row["language"], f"{row['bytes_per_token']:.2f}",
                      f"{row['fertility']:.2f}", f"{100 * row['continued_words']:.0f}%", trip)
    return shown
