"""Access to a prepared corpus: its parts, the decision about each document, and the texts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
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
from lmworks.corpus.engine.writing_pass import decisions_path, outputs
from lmworks.corpus.read import read
from lmworks.corpus.read.part import Item
from lmworks.errors import Unavailable, UserError
from lmworks.io.files import read_json
from lmworks.recipe.schema.corpus import Source

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
