"""Access to a prepared corpus: its parts, the decision about each document, the texts, and documents drawn at random.

`lmworks corpus sample` draws from the documents with a given fate, reason or bucket.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lmworks.corpus.document import split_id
from lmworks.corpus.engine.decisions import row_groups
from lmworks.corpus.engine.dedup_decisions import cuts_path, staged_path
from lmworks.corpus.engine.job import Job, Piece
from lmworks.corpus.engine.reading_pass import keys
from lmworks.corpus.engine.writing_pass import decisions_path, outputs
from lmworks.corpus.read import read
from lmworks.corpus.read.part import Item
from lmworks.errors import Unavailable, UserError
from lmworks.io.files import read_json
from lmworks.recipe.schema.corpus import Source
from lmworks.ui.terminal import bar

SPLITS = ("train", "validation")
DECISION_COLUMNS = ("id", "origin", "bytes", "language", "fate", "reason", "detail", "copy_of", "variant_of")


@dataclass(frozen=True)
class KeptDocument:
    """A document in the corpus: its file, its row in the file, and the columns of `lmworks.io.run_layout.COLUMNS`."""

    path: Path
    row: int
    columns: dict[str, str]


class PreparedCorpus:
    """The corpus in the directory `out`.

    Raises UserError if there is none, or if it is not finished. Relative paths of sources start at the directory in which it was made.
    """

    def __init__(self, out: Path) -> None:
        self.out = Path(out).resolve()
        if not (self.out / "report.json").is_file() or not (self.out / "staging" / "job.json").is_file():
            raise UserError(f"there is no finished corpus in {out}; make it with: lmworks corpus prepare RECIPE")
        with contextlib.chdir("."):
            try:
                self.job = Job.load(self.out)
            except FileNotFoundError as error:
                raise UserError(f"the directory {error.filename}, in which the corpus of {out} was made, no longer exists") from None
            self._directory = os.getcwd()

    @cached_property
    def report(self) -> Any:
        """report.json"""
        return read_json(self.out / "report.json")

    @cached_property
    def pieces(self) -> list[Piece]:
        """The parts that have decisions."""
        return [piece for piece in self.job.pieces if decisions_path(self.job, piece).is_file()]

    def source(self, name: str) -> Source:
        """A source by name; UserError if the corpus does not have it."""
        for source in self.job.sources:
            if source.name == name:
                return source
        raise UserError(f"the corpus has no source {name!r}; it has: {', '.join(source.name for source in self.job.sources)}")

    def piece(self, source: str, number: int) -> Piece:
        """A part of a source; UserError if there is none with this number."""
        found = [piece for piece in self.pieces if piece.source.name == self.source(source).name]
        for piece in found:
            if piece.number == number:
                return piece
        raise UserError(f"source {source} has no part {number}; it has {len(found)}, numbered from 0")

    def decisions(self, piece: Piece, columns: Sequence[str] | None = DECISION_COLUMNS) -> Iterator[tuple[int, pa.Table]]:
        """(number of the first document, rows): the decisions about the documents of a part, in the order in which they were read.

        With `columns` None, all columns are read, including the statistics.
        """
        return row_groups(decisions_path(self.job, piece), columns)

    def items(self, piece: Piece) -> Iterator[Item]:
        """Read a part again. While the files of the source are unchanged, item n belongs to row n of the decisions.

        Raises UserError if the source cannot be read any more.
        """
        with contextlib.chdir(self._directory):
            try:
                yield from read(piece.source, piece.part, int(self.job.recipe.corpus.max_document_bytes))
            except (OSError, Unavailable) as error:
                why = getattr(error, "strerror", None) or error
                raise UserError(f"source {piece.source.name} cannot be read again: {why}") from None

    def kept(self, piece: Piece, columns: Sequence[str] = ("id", "text")) -> Iterator[tuple[Path, int, pa.Table]]:
        """(file, its first row in this table, rows) of the documents of a part that are in train/ or validation/."""
        for path in outputs(self.job, piece):
            if path.is_file():
                yield from ((path, first, rows) for first, rows in row_groups(path, columns))

    def find_kept(self, identity: str) -> KeptDocument | None:
        """A document by its id, or None if it was not kept."""
        for path, first, rows in self.kept(self.piece_of(identity), ("id",)):
            place = pc.index(rows["id"], identity).as_py()
            if place >= 0:
                with pq.ParquetFile(path) as file:
                    row = _row(file, first + place)
                return KeptDocument(path, first + place, row)
        return None

    def staged(self, piece: Piece, identity: str) -> tuple[int, str] | None:
        """(row, text) of a document after the steps; None if a step dropped it or staged text was deleted."""
        path = staged_path(self.job, piece)
        for first, rows in row_groups(path, ("id", "text")) if path.is_file() else ():
            place = pc.index(rows["id"], identity).as_py()
            if place >= 0:
                return first + place, rows["text"][place].as_py()
        return None

    def cut(self, piece: Piece, identity: str) -> tuple[str, float] | None:
        """(text of a document after passages that occurred earlier were cut, fraction of its words that is left); None if nothing was cut
        or staged text was deleted.
        """
        found, path = self.staged(piece, identity), cuts_path(self.job, piece)
        if found is None or not path.is_file():
            return None
        rows = pq.read_table(path)
        place = pc.index(rows["row"], found[0]).as_py()
        return (rows["text"][place].as_py(), rows["left"][place].as_py()) if place >= 0 else None

    def piece_of(self, identity: str) -> Piece:
        """The part of a document; UserError if this is no id of the corpus."""
        source, part, _, _ = split_id(identity)
        return self.piece(source, part)


def source_changed_error(source: Source) -> UserError:
    """The error for a source whose documents differ from those that the corpus was made from."""
    return UserError(f"source {source.name} has changed since the corpus was made, or no longer exists: run lmworks corpus prepare again")


def _row(file: pq.ParquetFile, row: int) -> dict[str, str]:
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if row < count:
            found: dict[str, str] = file.read_row_group(group).slice(row, 1).to_pylist()[0]
            return found
        row -= count
    raise AssertionError("the row was found in this file")


@dataclass(frozen=True)
class SampleFilter:
    """The documents to draw from: those that match every given field.

    `fate` is `train`, `validation`, `quarantine`, `max_bytes`, or the step or pass that dropped them; `bucket` applies to the first two.
    """

    source: str | None = None
    fate: str | None = None
    reason: str | None = None
    bucket: str | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value is not None) or "any kind"


@dataclass(frozen=True)
class SampledDocument:
    """A document of the sample. `decision` is its row of the decisions, with the statistics.

    `text` is the text in the corpus if the document was kept, in `output` (SPLIT/OUTPUT); otherwise the text in the source, or an excerpt
    of it for a quarantined row.
    """

    decision: dict[str, Any]
    text: str
    output: str | None


def sample(corpus: PreparedCorpus, choice: SampleFilter, count: int = 10, seed: int = 0) -> list[SampledDocument]:
    """Draw `count` documents (or all, if there are fewer), in the order of their ids. The same seed draws the same documents.

    Raises UserError if no document matches, or if the text of one cannot be read again.
    """
    pieces = _pieces(corpus, choice)
    least: list[tuple[int, str]] = []  # (negative key, id), so that nlargest keeps the smallest keys
    with bar("draw", len(pieces)) as progress:
        for piece in pieces:
            progress.note(str(piece))
            for ids in _ids(corpus, choice, piece):
                drawn = zip((-value for value in keys(ids, seed, "sample").tolist()), ids, strict=True)
                least = heapq.nlargest(count, [*least, *drawn])
            progress.advance()
    if not least:
        raise UserError(f"the corpus has no document with {choice}; it has: {', '.join(_available_values(corpus, choice))}")
    return read_documents(corpus, [identity for _, identity in least])


def read_documents(corpus: PreparedCorpus, ids: Collection[str]) -> list[SampledDocument]:
    """The documents with these ids, in the order of the corpus. Raises UserError for an unknown id."""
    by_piece: dict[str, list[str]] = {}
    for identity in sorted(ids, key=split_id):
        by_piece.setdefault(str(corpus.piece_of(identity)), []).append(identity)
    return [one for some in by_piece.values() for one in _of_piece(corpus, corpus.piece_of(some[0]), some)]


def _pieces(corpus: PreparedCorpus, choice: SampleFilter) -> list[Piece]:
    if choice.source:
        corpus.source(choice.source)
    if choice.bucket and (choice.reason or choice.fate not in (None, *SPLITS)):
        raise UserError(f"documents of a bucket were kept: leave out {'the reason' if choice.reason else f'the fate {choice.fate}'}")
    return [piece for piece in corpus.pieces if choice.source in (None, piece.source.name)]


def _ids(corpus: PreparedCorpus, choice: SampleFilter, piece: Piece) -> Iterator[list[str]]:
    if choice.bucket:
        for path, _, rows in corpus.kept(piece, ("id",)):
            if path.parent.name == f"{piece.source.name}.{choice.bucket}" and choice.fate in (None, path.parent.parent.name):
                yield rows["id"].to_pylist()
        return
    for _, rows in corpus.decisions(piece, ("id", "fate", "reason")):
        for column, wanted in (("fate", choice.fate), ("reason", choice.reason)):
            rows = rows if wanted is None else rows.filter(pc.equal(rows[column], wanted))
        yield rows["id"].to_pylist()


def _available_values(corpus: PreparedCorpus, choice: SampleFilter) -> list[str]:
    """The values that could be requested instead, for the same source."""
    found: dict[str, None] = {}
    for piece in _pieces(corpus, SampleFilter(choice.source)):
        if choice.bucket:
            found |= dict.fromkeys(f"bucket {bucket.name}" for bucket in piece.source.buckets)
            continue
        for _, rows in corpus.decisions(piece, ("fate", "reason")):
            pairs = rows.group_by(["fate", "reason"]).aggregate([]).to_pylist()
            found |= dict.fromkeys(f"{pair['fate']} {pair['reason']}".strip() for pair in pairs)
    return sorted(found) or ["no buckets" if choice.bucket else "none at all"]


def _of_piece(corpus: PreparedCorpus, piece: Piece, ids: list[str]) -> list[SampledDocument]:
    wanted = pa.array(ids, pa.string())
    decisions: dict[str, dict[str, Any]] = {}
    for _, rows in corpus.decisions(piece, None):
        decisions |= {row["id"]: row for row in rows.filter(pc.is_in(rows["id"], wanted)).to_pylist()}
    if lost := next((identity for identity in ids if identity not in decisions), None):
        raise UserError(f"the corpus has no document {lost}; part {piece.number} of {piece.source.name} ends before it")
    texts: dict[str, tuple[str, str | None]] = {}
    for path, _, rows in corpus.kept(piece):
        some = rows.filter(pc.is_in(rows["id"], wanted))
        texts |= {one["id"]: (one["text"], f"{path.parent.parent.name}/{path.parent.name}") for one in some.to_pylist()}
    for identity in ids:
        if identity not in texts and decisions[identity]["variant_of"]:  # it is not in the source
            found = corpus.staged(piece, identity)
            texts[identity] = found[1] if found else "", None
    numbers = {split_id(identity)[2]: identity for identity in ids if identity not in texts}
    texts |= {identity: (text, None) for identity, text in _from_source(corpus, piece, numbers, decisions)}
    return [SampledDocument(decisions[identity], *texts[identity]) for identity in ids]


def _from_source(
    corpus: PreparedCorpus, piece: Piece, numbers: dict[int, str], decisions: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    left = len(numbers)
    for number, item in enumerate(corpus.items(piece) if numbers else ()):
        if number in numbers:
            identity = numbers[number]
            if item.origin != decisions[identity]["origin"]:
                raise source_changed_error(piece.source)
            yield identity, item.text
            left -= 1
            if not left:
                return
    if left:
        raise source_changed_error(piece.source)
