"""Statistics of sets of documents, computed per part and added up.

Statistics of one part of a corpus, from its decisions and, on request, from its texts before and after the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lmworks.corpus.analysis.perplexity import ReferenceModel
from lmworks.corpus.analysis.prepared import SPLITS, PreparedCorpus, source_changed_error
from lmworks.corpus.document import split_id, variant_id
from lmworks.corpus.engine.decisions import row_groups
from lmworks.corpus.engine.duplicates_pass import HELD, REASONS
from lmworks.corpus.engine.job import Piece
from lmworks.corpus.engine.reading_pass import BATCH_CHARACTERS
from lmworks.corpus.engine.step_runner import Count
from lmworks.corpus.histogram import Histogram
from lmworks.corpus.units import units
from lmworks.errors import UserError
from lmworks.io.run_layout import corpus_files


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


CountTokens = Callable[[Sequence[str]], Sequence[int]]
"""Number of tokens of each text. It is pickled to worker processes."""

_COLUMNS = ("bytes", "language", "fate", "reason", "copy_of", "variant_of")
_PER_OUTPUT = 500_000  # characters of held-out text per output that the reference model is trained on
_VARIANTS, _NUMBERS, _PARTS = 8, 28, 18  # bits of a packed id; the remaining bits hold the source


def measure_part(out: Path, name: str, number: int, texts: bool, count_tokens: CountTokens | None) -> tuple[Tally, str | None]:
    """The statistics of one part. If `texts` is true, its texts are read too.

    The second value is None, or the reason why the texts of dropped documents could not be read again; kept texts are measured in any case.
    """
    corpus = _open_corpus(out)
    piece = corpus.piece(name, number)
    tally = Tally()
    for _, rows in corpus.decisions(piece, _COLUMNS):
        _count_decisions(corpus, tally, rows)
    if not texts:
        return tally, None
    measure = _TextMeasurement(reference_model(out), count_tokens)
    for batch in _kept_texts(corpus, piece):
        measure.add(batch, [[tally.train.texts]] * len(batch))
    try:
        _measure_source_texts(corpus, piece, tally, measure)
    except UserError as error:
        for side in (tally.read, *tally.dropped.values()):
            side.texts = TextFigures()  # some texts may belong to other documents
        return tally, str(error)
    return tally, None


@lru_cache(maxsize=1)
def _open_corpus(out: Path) -> PreparedCorpus:
    return PreparedCorpus(out)


@lru_cache(maxsize=1)
def reference_model(out: Path) -> ReferenceModel:
    """The reference model, trained on some held-out text of each output of the corpus."""

    def texts() -> Iterator[str]:
        for paths in corpus_files(out, "validation").values():
            left = _PER_OUTPUT
            for path in paths:
                for _, rows in row_groups(path, ["text"]):
                    for text in rows["text"].to_pylist():
                        if left > 0:
                            yield text[:left]
                            left -= len(text)

    return ReferenceModel(texts())


def _count_decisions(corpus: PreparedCorpus, tally: Tally, rows: pa.Table) -> None:
    fate = rows["fate"]
    read = pc.and_(pc.not_equal(fate, "quarantine"), pc.equal(rows["variant_of"], ""))
    tally.read.add(rows.filter(read))
    tally.train.add(rows.filter(pc.equal(fate, "train")))
    held = rows.filter(pc.equal(fate, "validation"))
    tally.validation.add(pc.sum(held["bytes"]).as_py() or 0, held.num_rows)
    dropped = rows.filter(pc.invert(pc.is_in(fate, pa.array(SPLITS))))
    for step, reason in dict.fromkeys(zip(dropped["fate"].to_pylist(), dropped["reason"].to_pylist(), strict=True)):
        chosen = pc.and_(pc.equal(dropped["fate"], step), pc.equal(dropped["reason"], reason))
        tally.dropped.setdefault((step, reason), DocumentFigures()).add(dropped.filter(chosen))
    for reason in REASONS[1:HELD]:
        same = rows.filter(pc.equal(rows["reason"], reason))
        if same.num_rows:
            tally.duplicates.setdefault(reason, Count()).add(pc.sum(same["bytes"]).as_py(), same.num_rows)
            tally.copied.append(pack_ids(corpus, same["copy_of"].to_pylist()))


def pack_ids(corpus: PreparedCorpus, ids: Sequence[str]) -> np.ndarray:
    """The inverse of `unpack_id`: (N,) ids of documents as uint64 with source, part, number and variant."""
    places = {source.name: place for place, source in enumerate(corpus.job.sources)}
    split = [split_id(identity) for identity in ids]
    return np.array(
        [((places[name] << _PARTS | part) << _NUMBERS | number) << _VARIANTS | variant for name, part, number, variant in split],
        dtype=np.uint64,
    )


def unpack_id(corpus: PreparedCorpus, value: int) -> str:
    """The document id of a packed value."""
    value, variant = divmod(value, 1 << _VARIANTS)
    name = corpus.job.sources[value >> (_PARTS + _NUMBERS)].name
    return variant_id(f"{name}/{value >> _NUMBERS & (1 << _PARTS) - 1}/{value & (1 << _NUMBERS) - 1}", variant)


class _TextMeasurement:
    """Measures texts and adds the results to `TextFigures` objects. Documents with the same fate share one object."""

    def __init__(self, model: ReferenceModel, count_tokens: CountTokens | None) -> None:
        self._model, self._count_tokens = model, count_tokens

    def add(self, texts: Sequence[str], belongs: Sequence[Sequence[TextFigures]], skip: Sequence[bool] = ()) -> None:
        """Measure texts. `belongs` lists the `TextFigures` objects that each text counts in; `skip` is true for texts that the reference
        model was trained on.
        """
        sizes = [len(text.encode()) for text in texts]
        words = np.diff(units(texts).bounds).tolist()
        tokens = list(self._count_tokens(texts)) if self._count_tokens else [0] * len(texts)
        perplexity = self._model.perplexity(texts) if self._model.bytes else np.full(len(texts), np.nan)
        if len(skip):
            perplexity[np.array(skip)] = np.nan
        by_texts: dict[int, tuple[TextFigures, list[int]]] = {}
        for place, some in enumerate(belongs):
            for one in some:
                by_texts.setdefault(id(one), (one, []))[1].append(place)
        for one, places in by_texts.values():
            one.add(*([values[place] for place in places] for values in (sizes, words, tokens, perplexity.tolist())))


def _kept_texts(corpus: PreparedCorpus, piece: Piece) -> Iterator[list[str]]:
    for path, _, rows in corpus.kept(piece, ("text",)):
        if path.parent.parent.name == "train":
            yield from _batches(rows["text"].to_pylist())


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _measure_source_texts(corpus: PreparedCorpus, piece: Piece, tally: Tally, measure: _TextMeasurement) -> None:
    """Measure the texts before the first step. Raises UserError if the source has changed."""
    waiting: list[tuple[str, list[TextFigures], bool]] = []
    characters = 0

    def measured() -> None:
        texts, belongs, skip = zip(*waiting, strict=True)
        measure.add(texts, belongs, skip)

    for item, decision in zip_longest(corpus.items(piece), _read_decisions(corpus, piece)):
        if item is None or decision is None or item.origin != decision[0] or (item.reason is None) == (decision[1] == "quarantine"):
            raise source_changed_error(piece.source)
        if item.reason is not None:
            continue
        _, fate, reason = decision
        side = tally.dropped.get((fate, reason)) if fate not in SPLITS else None
        waiting.append((item.text, [tally.read.texts, *([side.texts] if side else [])], fate == "validation"))
        characters += len(item.text)
        if characters >= BATCH_CHARACTERS:
            measured()
            waiting, characters = [], 0
    if waiting:
        measured()


def _read_decisions(corpus: PreparedCorpus, piece: Piece) -> Iterator[tuple[str, str, str]]:
    """(origin, fate, reason) of each document of a part that was read; variants are left out."""
    for _, rows in corpus.decisions(piece, ("origin", "fate", "reason", "variant_of")):
        rows = rows.filter(pc.equal(rows["variant_of"], ""))
        yield from zip(*(rows[name].to_pylist() for name in ("origin", "fate", "reason")), strict=True)
