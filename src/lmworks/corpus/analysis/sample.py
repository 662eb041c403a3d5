"""`lmworks corpus sample`: documents drawn at random from those with a given fate, reason or bucket."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lmworks.corpus.analysis.prepared import SPLITS, PreparedCorpus, source_changed_error
from lmworks.corpus.document import split_id
from lmworks.corpus.engine.job import Piece
from lmworks.corpus.engine.sampling import keys
from lmworks.errors import UserError
from lmworks.ui.terminal import bar


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
