"""Decisions about the documents that the steps kept: which are duplicates of which, and which are held out.

Rows are in the order of priority, so that the first of several copies is kept. Only keys, sketches and sizes are read, except for the few
pairs whose sketches are inconclusive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lmworks.corpus.dedup.signatures import Signatures
from lmworks.corpus.document import variant_id
from lmworks.corpus.engine.decisions import row_groups
from lmworks.corpus.engine.job import Job, Piece
from lmworks.corpus.engine.reading_pass import read_inputs
from lmworks.io.files import sha256_file
from lmworks.recipe.changes import as_tree

DEDUP_DECISIONS = pa.schema([("reason", pa.string()), ("copy_of", pa.string()), ("held", pa.bool_())])
CUTS = pa.schema([("row", pa.int64()), ("text", pa.string()), ("left", pa.float64())])
REPEATED = "repeated_passages"


@dataclass(frozen=True)
class DedupDecisions:
    """Per staged row of a part: why it is a duplicate (None if it is not), of which document, and whether it is held out.

    `cuts` are the texts, by row, of training documents from which a passage was cut.
    """

    reasons: list[str | None]
    copies: list[str | None]
    held: np.ndarray
    in_training: np.ndarray
    cuts: Mapping[int, str]

    @classmethod
    def load(cls, job: Job, piece: Piece, cut: bool = True) -> DedupDecisions:
        """Load the decisions. `cut` is False for passes that run before passages are cut."""
        rows = pq.read_table(dedup_decisions_path(job, piece))
        reasons, held = rows["reason"].to_pylist(), np.array(rows["held"].to_pylist(), dtype=bool)
        dropped = np.array([reason is not None for reason in reasons], dtype=bool)
        cuts: dict[int, str] = {}
        if cut and cuts_passages(job):
            assert job.recipe.corpus.dedup.substring
            for row, text, left in zip(*pq.read_table(cuts_path(job, piece)).to_pydict().values(), strict=True):
                if left < job.recipe.corpus.dedup.substring.min_remaining_fraction or not text.strip():
                    reasons[row], dropped[row] = REPEATED, True
                else:
                    cuts[row] = text
        return cls(reasons, rows["copy_of"].to_pylist(), held, ~held & ~dropped, cuts)

    @staticmethod
    def digest(job: Job, piece: Piece, cut: bool = True) -> str:
        """Hash of the decisions; empty before they exist."""
        paths = [dedup_decisions_path(job, piece), *([cuts_path(job, piece)] if cut and cuts_passages(job) else [])]
        return "".join(sha256_file(path) if path.exists() else "" for path in paths)


def cuts_passages(job: Job) -> bool:
    """Whether repeated passages are cut."""
    return job.recipe.corpus.dedup.substring is not None


def cuts_path(job: Job, piece: Piece) -> Path:
    """The file with the documents of a part from which a passage was cut."""
    return job.path("cut_passages", piece, ".parquet")


def dedup_decisions_path(job: Job, piece: Piece) -> Path:
    """The file with the decisions of the pass `resolve_duplicates` about a part."""
    return job.path("resolve_duplicates", piece, ".parquet")


def staged_path(job: Job, piece: Piece) -> Path:
    """The file with the documents of a part that the steps kept."""
    return job.path("read", piece, ".parquet")


@dataclass(frozen=True)
class TextBatch:
    """Some documents of a part, in order."""

    ids: list[str]
    texts: list[str]


def read_texts(job: Job, piece: Piece, chosen: np.ndarray, cuts: Mapping[int, str] = MappingProxyType({})) -> Iterator[TextBatch]:
    """Ids and texts of the chosen rows of a part, one row group at a time; texts in `cuts` replace those of their rows."""
    for first, rows in row_groups(staged_path(job, piece), ["id", "text"]):
        places = np.flatnonzero(chosen[first : first + rows.num_rows])
        if len(places):
            some = rows.take(places)
            texts = some["text"].to_pylist()
            texts = [cuts.get(first + place, text) for place, text in zip(places.tolist(), texts, strict=True)]
            yield TextBatch(some["id"].to_pylist(), texts)


def parts_by_priority(job: Job) -> list[Piece]:
    """The parts in the order of priority."""
    rank = {name: place for place, name in enumerate(job.recipe.corpus.dedup.priority)}
    sources = sorted(job.sources, key=lambda source: rank.get(source.name, len(rank)))
    return [piece for source in sources for piece in job.of(source)]


class StagedRows:
    """All staged documents of a job as rows in the order of priority."""

    def __init__(self, job: Job) -> None:
        self.pieces = parts_by_priority(job)
        self.kept = [np.load(job.path("read", piece, ".keys.npy")) for piece in self.pieces]
        self.firsts = np.concatenate(([0], np.cumsum([len(kept) for kept in self.kept], dtype=np.int64)))
        self.signatures = [Signatures(job.path("read", piece, ".traces"), piece.source) for piece in self.pieces]

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def span(self, number: int) -> slice:
        """The rows of the piece of this number."""
        return slice(int(self.firsts[number]), int(self.firsts[number + 1]))

    def id(self, row: int) -> str:
        """The id of a document."""
        number = int(np.searchsorted(self.firsts, row, side="right")) - 1
        piece = self.pieces[number]
        kept = self.kept[number][row - self.firsts[number]]
        return variant_id(f"{piece.source.name}/{piece.number}/{kept['number']}", int(kept["variant"]))

    @cached_property
    def originals(self) -> np.ndarray:
        """(N,) the row of each row's original; a row that is not a variant is its own. Variants follow their original."""
        found = np.arange(len(self))
        for number, kept in enumerate(self.kept):
            span = self.span(number)
            found[span] = np.maximum.accumulate(np.where(kept["variant"] == 0, found[span], span.start))
        return found


def resolve_duplicates_inputs(job: Job, task: str) -> Any:
    corpus = job.recipe.corpus
    dedup = [as_tree(corpus.dedup), [[source.name, as_tree(source.dedup)] for source in job.sources]]
    hold = [job.recipe.seed, corpus.validation_fraction, int(corpus.max_validation_bytes)]
    return [[[str(piece), read_inputs(job, piece)] for piece in job.pieces], dedup, hold]
