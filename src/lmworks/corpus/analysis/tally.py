"""Statistics of sets of documents, computed per part and added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lmworks.corpus.engine.counts import Count
from lmworks.corpus.histogram import Histogram


@dataclass
class TextFigures:
    """Statistics that need the texts: number of texts, bytes, words, tokens, and perplexity."""

    documents: int = 0
    bytes: int = 0
    words: int = 0
    tokens: int = 0
    perplexity: Histogram = field(default_factory=Histogram)

    def add(self, sizes: Sequence[int], words: Sequence[int], tokens: Sequence[int], perplexity: Sequence[float]) -> None:
        """Add texts. A list may be empty if it was not measured."""
        self.documents += len(sizes)
        self.bytes += sum(sizes)
        self.words += sum(words)
        self.tokens += sum(tokens)
        self.perplexity.add(perplexity)

    def merge(self, other: TextFigures) -> None:
        self.documents += other.documents
        self.bytes += other.bytes
        self.words += other.words
        self.tokens += other.tokens
        self.perplexity.merge(other.perplexity)


@dataclass
class DocumentFigures:
    """Statistics of a set of documents: all are counted by language and length, and some texts are measured.

    Lengths and bytes per language are those that were read; a step may have changed the text since.
    """

    count: Count = field(default_factory=Count)
    languages: dict[str, Count] = field(default_factory=dict)
    lengths: Histogram = field(default_factory=Histogram)
    texts: TextFigures = field(default_factory=TextFigures)

    def add(self, rows: pa.Table) -> None:
        """Add rows of the decisions."""
        sizes = rows["bytes"]
        self.count.add(pc.sum(sizes).as_py() or 0, rows.num_rows)
        grouped = rows.group_by("language").aggregate([("bytes", "sum"), ("bytes", "count")])
        for language, total, documents in zip(*(grouped[name].to_pylist() for name in grouped.column_names), strict=True):
            self.languages.setdefault(language, Count()).add(total, documents)
        self.lengths.add(sizes.to_pylist())

    def merge(self, other: DocumentFigures) -> None:
        self.count.add(other.count.bytes, other.count.documents)
        for language, one in other.languages.items():
            self.languages.setdefault(language, Count()).add(one.bytes, one.documents)
        self.lengths.merge(other.lengths)
        self.texts.merge(other.texts)

    def as_json(self) -> dict[str, Any]:
        """Words and tokens of all documents are extrapolated by bytes from the measured texts; null if none were measured."""
        scale = self.count.bytes / self.texts.bytes if self.texts.bytes else 0.0
        return {
            **asdict(self.count),
            "words": round(self.texts.words * scale) if self.texts.words else None,
            "tokens": round(self.texts.tokens * scale) if self.texts.tokens else None,
            "measured": {"documents": self.texts.documents, "bytes": self.texts.bytes},
            "languages": {name: asdict(one) for name, one in sorted(self.languages.items(), key=lambda pair: -pair[1].bytes)},
            "lengths": self.lengths.as_json(),
            "perplexity": self.texts.perplexity.as_json(),
        }


@dataclass
class Tally:
    """Statistics of a part, a source, a domain or the whole corpus: documents read, documents to train on, and dropped documents by (step,
    reason).

    `copied` are the originals of duplicates, packed by `measuring.pack_ids`, one entry per duplicate.
    """

    read: DocumentFigures = field(default_factory=DocumentFigures)
    train: DocumentFigures = field(default_factory=DocumentFigures)
    validation: Count = field(default_factory=Count)
    dropped: dict[tuple[str, str], DocumentFigures] = field(default_factory=dict)
    duplicates: dict[str, Count] = field(default_factory=dict)
    copied: list[np.ndarray] = field(default_factory=list)

    def merge(self, other: Tally) -> None:
        self.read.merge(other.read)
        self.train.merge(other.train)
        self.validation.add(other.validation.bytes, other.validation.documents)
        for why, side in other.dropped.items():
            self.dropped.setdefault(why, DocumentFigures()).merge(side)
        for reason, one in other.duplicates.items():
            self.duplicates.setdefault(reason, Count()).add(one.bytes, one.documents)
        self.copied += other.copied

    def as_json(self) -> dict[str, Any]:
        ranked = sorted(self.dropped.items(), key=lambda pair: (-pair[1].count.documents, pair[0]))
        return {
            "read": self.read.as_json(),
            "train": self.train.as_json(),
            "validation": asdict(self.validation),
            "dropped": [{"step": step, "reason": reason, **asdict(side.count), **_medians(side)} for (step, reason), side in ranked],
            "duplicates": {reason: asdict(one) for reason, one in sorted(self.duplicates.items())},
        }


def _medians(side: DocumentFigures) -> dict[str, Any]:
    lengths, perplexity = side.lengths, side.texts.perplexity
    return {"median_bytes": lengths.quantile(0.5), "median_perplexity": perplexity.quantile(0.5) if perplexity.count else None}
