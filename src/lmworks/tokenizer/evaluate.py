"""Evaluation of tokenizers per source and language: bytes per token and fertility (Rust et al. 2021, arXiv:2012.15613)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow.parquet as pq

from lmworks.documents import corpus_files
from lmworks.errors import UserError
from lmworks.letters import words as words_of
from lmworks.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.table import Table


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
    with dictionaries for scripts without spaces (`lmworks.letters.words`); a word is encoded with the space before it, as in running text.
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
