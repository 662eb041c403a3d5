"""The first pass over a source: read, draw, clean, judge.

Survivors go to a parquet file on disk, and of each only its hashes stay in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lmworks.corpus.cleaning import encodable, fingerprint_form
from lmworks.corpus.document import Batch, Document, Drop, Step
from lmworks.corpus.drawing import draw
from lmworks.corpus.items import Item, Reading
from lmworks.corpus.minhash import signatures
from lmworks.corpus.report import Samples, SourceReport
from lmworks.documents import COLUMNS
from lmworks.files import atomic_path
from lmworks.progress import Bar
from lmworks.recipe.corpus import Corpus, Source

SCHEMA = pa.schema([(name, pa.string()) for name in COLUMNS])
BATCH_CHARACTERS = 1 << 19  # numpy's temporaries then stay in the cache
_IN_MEMORY = 64_000_000


@dataclass(frozen=True)
class Staged:
    """The survivors of a source: their file, and per document size, hash of the normalised text, and MinHash signature (or None)."""

    source: Source
    path: Path
    ids: list[str]
    sizes: np.ndarray  # (N,) int64 bytes
    digests: np.ndarray  # (N,) void128
    signatures: np.ndarray | None  # (N, permutations) uint32


@contextmanager
def writing(path: Path) -> Iterator[pq.ParquetWriter]:
    """Write a parquet file of documents, whole or not at all; the same documents give the same bytes."""
    dictionaries = ["source", "domain", "language"]
    with (
        atomic_path(path) as aside,
        pq.ParquetWriter(
            aside, SCHEMA, compression="zstd", compression_level=1, write_statistics=False, use_dictionary=dictionaries
        ) as out,
    ):
        yield out


def _counted(reading: Reading, bar: Bar) -> Iterator[tuple[int, Item]]:
    left = reading.total if reading.total is not None else float("inf")
    for number, item in enumerate(reading.open()):
        if step := min(item.consumed, left):
            bar.advance(step)
            left -= step
        yield number, item


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class Stager:
    """Takes one source through the first pass."""

    def __init__(
        self,
        source: Source,
        steps: Sequence[Step],
        corpus: Corpus,
        seed: int,
        path: Path,
        report: SourceReport,
        quarantine: Samples,
        rejected: Samples,
    ) -> None:
        self._source, self._steps, self._corpus, self._seed, self._path = source, steps, corpus, seed, path
        self._report, self._quarantine, self._rejected = report, quarantine, rejected
        self._ids: list[str] = []
        self._sizes: list[int] = []
        self._digests: list[bytes] = []
        self._signatures: list[np.ndarray] = []

    def _id(self, number: int) -> str:
        return f"{self._source.name}/0/{number}"

    def _set_aside(self, number: int, reason: str, item: Item) -> None:
        size = max(item.consumed, _size(item.text))
        self._report.came.add(size)
        self._report.quarantine(reason, size)
        self._quarantine.add(self._source.name, reason, self._id(number), item.origin, item.text)

    def _sound(self, reading: Reading, bar: Bar) -> Iterator[tuple[int, Item]]:
        """Items that are documents; the others go to quarantine."""
        for number, item in _counted(reading, bar):
            if item.reason is not None:
                self._set_aside(number, item.reason, item)
            elif _size(item.text) > self._corpus.max_document:
                self._set_aside(number, "enormous", item)
            elif not item.text.isascii() and not encodable(item.text):
                self._set_aside(number, "bad_utf8", item)
            elif not item.text.strip():
                self._set_aside(number, "empty_text", item)
            else:
                self._report.came.add(_size(item.text))
                yield number, item

    def _drawn(self, reading: Reading, bar: Bar) -> Iterator[tuple[int, Item]]:
        """The sound items, or with `max_bytes` those drawn: sizes are learnt first, and a source over 64 MB is then read a second time."""
        if self._source.max_bytes is None or self._source.kind == "huggingface":
            yield from self._sound(reading, bar)
            return
        kept: list[tuple[int, Item]] | None = []
        numbers, sizes, held = [], [], 0
        for number, item in self._sound(reading, bar):
            size = _size(item.text)
            numbers.append(number)
            sizes.append(size)
            held += size
            if kept is not None:
                kept.append((number, item))
                if held > _IN_MEMORY:
                    kept = None
        chosen = draw([self._id(number) for number in numbers], np.array(sizes, dtype=np.int64), self._seed, int(self._source.max_bytes))
        self._report.not_drawn.add(int(np.array(sizes)[~chosen].sum()) if sizes else 0, int((~chosen).sum()))
        wanted = {number for number, take in zip(numbers, chosen, strict=True) if take}
        again = kept if kept is not None else enumerate(reading.open())
        yield from ((number, item) for number, item in again if number in wanted)

    def run(self, reading: Reading, bar: Bar) -> Staged:
        """Read the source and write what survives."""
        with writing(self._path) as out:
            batch: list[tuple[int, Item]] = []
            characters = 0
            for number, item in self._drawn(reading, bar):
                batch.append((number, item))
                characters += len(item.text)
                if characters >= BATCH_CHARACTERS:
                    self._process(batch, out)
                    batch, characters = [], 0
            self._process(batch, out)
        digests = np.frombuffer(b"".join(self._digests), dtype="V16")
        found = np.concatenate(self._signatures) if self._signatures else None
        return Staged(self._source, self._path, self._ids, np.array(self._sizes, dtype=np.int64), digests, found)

    def _process(self, rows: list[tuple[int, Item]], out: pq.ParquetWriter) -> None:
        source = self._source
        batch = Batch([
            Document(self._id(number), item.text, item.origin, source.name, source.domain, source.language) for number, item in rows
        ])
        for step in self._steps:
            batch = self._through(step, batch)
        if not len(batch):
            return
        if minhash := self._corpus.dedup.minhash:
            self._signatures.append(signatures(batch.units, minhash.ngram, minhash.permutations))
        kept = batch.documents
        self._ids += [document.id for document in kept]
        self._sizes += [_size(document.text) for document in kept]
        self._digests += [hashlib.blake2b(fingerprint_form(document.text).encode(), digest_size=16).digest() for document in kept]
        columns = [[getattr(document, name) for document in kept] for name in COLUMNS[:-1]]
        facts = [json.dumps(dict(document.facts), ensure_ascii=False, sort_keys=True) for document in kept]
        out.write_batch(pa.record_batch([pa.array(column, pa.string()) for column in (*columns, facts)], schema=SCHEMA))

    def _through(self, step: Step, batch: Batch) -> Batch:
        """What a step leaves of a batch; what it drops is counted."""
        kept = []
        changed = False
        for document, outcome in zip(batch.documents, step(batch) if len(batch) else (), strict=True):
            if isinstance(outcome, Drop):
                self._report.drop(outcome.reason, _size(document.text))
                self._rejected.add(self._source.name, outcome.reason, document.id, document.origin, document.text)
            else:
                kept.append(outcome)
            changed |= outcome is not document
        return Batch(kept) if changed else batch
