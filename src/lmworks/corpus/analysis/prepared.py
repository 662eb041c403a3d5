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
from lmworks.corpus.engine.dedup_decisions import cuts_path, staged
from lmworks.corpus.engine.job import Job, Piece
from lmworks.corpus.engine.passes.writing import decisions_path, outputs
from lmworks.corpus.engine.tables import row_groups
from lmworks.corpus.readers import read
from lmworks.corpus.readers.items import Item, Unavailable
from lmworks.errors import UserError
from lmworks.files import read_json
from lmworks.recipe.schema.corpus import Source

SPLITS = ("train", "validation")
ROW = ("id", "origin", "bytes", "language", "fate", "reason", "detail", "copy_of", "variant_of")


@dataclass(frozen=True)
class Kept:
    """A document as it stands in the corpus: the file and its row there, the columns of `lmworks.documents.COLUMNS`."""

    path: Path
    row: int
    columns: dict[str, str]


class Prepared:
    """The corpus in the directory `out`.

    Raises UserError if there is none, or one that is not finished. Sources are read from the directory in which it was made.
    """

    def __init__(self, out: Path) -> None:
        self.out = Path(out).resolve()
        if not (self.out / "report.json").is_file() or not (self.out / "staging" / "job.json").is_file():
            raise UserError(f"there is no finished corpus in {out}; make it with: lmworks corpus prepare RECIPE")
        with contextlib.chdir("."):
            try:
                self.job = Job.load(self.out)
            except FileNotFoundError as error:
                raise UserError(f"the directory {error.filename}, in which the corpus of {out} was made, is gone") from None
            self._directory = os.getcwd()

    @cached_property
    def report(self) -> Any:
        """report.json"""
        return read_json(self.out / "report.json")

    @cached_property
    def pieces(self) -> list[Piece]:
        """The parts whose decisions are there."""
        return [piece for piece in self.job.pieces if decisions_path(self.job, piece).is_file()]

    def source(self, name: str) -> Source:
        """A source by name; UserError for one that the corpus has not."""
        for source in self.job.sources:
            if source.name == name:
                return source
        raise UserError(f"the corpus has no source {name!r}; there are: {', '.join(source.name for source in self.job.sources)}")

    def piece(self, source: str, number: int) -> Piece:
        """A part of a source; UserError if there is none of this number."""
        found = [piece for piece in self.pieces if piece.source.name == self.source(source).name]
        for piece in found:
            if piece.number == number:
                return piece
        raise UserError(f"source {source} has no part {number}; there are {len(found)}, from 0 on")

    def decisions(self, piece: Piece, columns: Sequence[str] | None = ROW) -> Iterator[tuple[int, pa.Table]]:
        """(number of the first document, rows) of what was decided about the documents of a part, in the order they were read.

        `columns` None is all, the statistics included.
        """
        return row_groups(decisions_path(self.job, piece), columns)

    def items(self, piece: Piece) -> Iterator[Item]:
        """The part read again: its n-th item is the n-th row of the decisions, while the source's files are what they were.

        Raises UserError if they cannot be read any more.
        """
        with contextlib.chdir(self._directory):
            try:
                yield from read(piece.source, piece.part, int(self.job.recipe.corpus.max_document_bytes))
            except (OSError, Unavailable) as error:
                why = getattr(error, "strerror", None) or error
                raise UserError(f"source {piece.source.name} cannot be read again: {why}") from None

    def kept(self, piece: Piece, columns: Sequence[str] = ("id", "text")) -> Iterator[tuple[Path, int, pa.Table]]:
        """(file, its first row here, rows) of the documents of a part that are in train/ or validation/."""
        for path in outputs(self.job, piece):
            if path.is_file():
                yield from ((path, first, rows) for first, rows in row_groups(path, columns))

    def find_kept(self, identity: str) -> Kept | None:
        """A document by its id, if it was kept."""
        for path, first, rows in self.kept(self.piece_of(identity), ("id",)):
            place = pc.index(rows["id"], identity).as_py()
            if place >= 0:
                with pq.ParquetFile(path) as file:
                    row = _row(file, first + place)
                return Kept(path, first + place, row)
        return None

    def staged(self, piece: Piece, identity: str) -> tuple[int, str] | None:
        """(row, text) of a document as the steps have left it, if they have and staged text is kept."""
        path = staged(self.job, piece)
        for first, rows in row_groups(path, ("id", "text")) if path.is_file() else ():
            place = pc.index(rows["id"], identity).as_py()
            if place >= 0:
                return first + place, rows["text"][place].as_py()
        return None

    def cut(self, piece: Piece, identity: str) -> tuple[str, float] | None:
        """(what is left of a document without the passages that stood earlier, the share of its words), if it lost some and staged text
        is kept.
        """
        found, path = self.staged(piece, identity), cuts_path(self.job, piece)
        if found is None or not path.is_file():
            return None
        rows = pq.read_table(path)
        place = pc.index(rows["row"], found[0]).as_py()
        return (rows["text"][place].as_py(), rows["left"][place].as_py()) if place >= 0 else None

    def piece_of(self, identity: str) -> Piece:
        """The part of a document; UserError for what is no id of this corpus."""
        source, part, _, _ = split_id(identity)
        return self.piece(source, part)


def source_changed(source: Source) -> UserError:
    """The error for a source whose documents are not those from which the corpus was made."""
    return UserError(f"source {source.name} has changed, or is gone, since the corpus was made: run lmworks corpus prepare again")


def _row(file: pq.ParquetFile, row: int) -> dict[str, str]:
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if row < count:
            found: dict[str, str] = file.read_row_group(group).slice(row, 1).to_pylist()[0]
            return found
        row -= count
    raise AssertionError("the row was found in this file")
