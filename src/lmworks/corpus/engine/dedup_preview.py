"""A preview of deduplication: runs the passes up to it and shows their decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow.parquet as pq

from lmworks.corpus.engine import local_executor
from lmworks.corpus.engine.decisions import row_groups
from lmworks.corpus.engine.dedup_decisions import REPEATED, DedupDecisions, read_texts, staged_path
from lmworks.corpus.engine.job import Job, Piece
from lmworks.corpus.engine.passes import PASSES
from lmworks.corpus.engine.reading_pass import missing_facts
from lmworks.corpus.engine.step_runner import Count, Counts, count
from lmworks.corpus.read.part import EXCERPT
from lmworks.errors import raise_first

_EXAMPLES = 3
CUT = "passages_cut"


@dataclass(frozen=True)
class Duplicate:
    """A document that would be dropped or cut, and the document of which it is a copy, if any; with the beginnings of both texts."""

    id: str
    origin: str
    text: str
    copy_of: str | None
    copied_text: str


@dataclass
class SourceDuplicates:
    """Results for one source: the documents that reached deduplication, and per method the documents that it would drop, with examples.

    With the method `passages_cut` documents are kept, and the bytes are those of the passages.
    """

    source: str
    came: Count = field(default_factory=Count)
    dropped: Counts = field(default_factory=dict)
    examples: dict[str, list[Duplicate]] = field(default_factory=dict)


def preview_duplicates(job: Job) -> list[SourceDuplicates]:
    """What deduplication would drop, per source. `job.out` is a directory without other use; all work is done on this machine."""
    raise_first(missing_facts(job))
    job.save()
    local_executor.execute(job, PASSES[: [pass_.name for pass_ in PASSES].index("cut_passages") + 1])
    found = [_of_source(job, job.of(source), source.name) for source in job.sources]
    wanted = {one.copy_of for source in found for some in source.examples.values() for one in some if one.copy_of}
    texts = dict(_texts(job, wanted))
    for source in found:
        for method, some in source.examples.items():
            source.examples[method] = [
                Duplicate(one.id, one.origin, one.text, one.copy_of, texts.get(one.copy_of or "", "")) for one in some
            ]
    return found


def _of_source(job: Job, pieces: list[Piece], name: str) -> SourceDuplicates:
    found = SourceDuplicates(name)
    for piece in pieces:
        decisions, sizes = DedupDecisions.load(job, piece), np.load(job.path("read", piece, ".keys.npy"))["bytes"]
        found.came.add(int(sizes.sum()), len(sizes))
        for reason, size in zip(decisions.reasons, sizes.tolist(), strict=True):
            if reason:
                count(found.dropped, reason, size)
        for row, text in decisions.cuts.items():
            count(found.dropped, CUT, int(sizes[row]) - len(text.encode()))
        _add_examples(job, piece, decisions, found)
    return found


def _add_examples(job: Job, piece: Piece, decisions: DedupDecisions, found: SourceDuplicates) -> None:
    methods = {row: reason for row, reason in enumerate(decisions.reasons) if reason} | dict.fromkeys(decisions.cuts, CUT)
    chosen = np.zeros(len(decisions.held), dtype=bool)
    for method in dict.fromkeys(methods.values()):
        left = _EXAMPLES - len(found.examples.setdefault(method, []))
        chosen[[row for row, one in methods.items() if one == method][:left]] = True
    for first, rows in row_groups(staged_path(job, piece), ["id", "origin", "text"]) if chosen.any() else ():
        for place in np.flatnonzero(chosen[first : first + rows.num_rows]).tolist():
            one = rows.slice(place, 1).to_pylist()[0]
            row = first + place
            copy_of = decisions.copies[row] if methods[row] not in (CUT, REPEATED) else None
            found.examples[methods[row]].append(Duplicate(one["id"], one["origin"], one["text"][:EXCERPT], copy_of, ""))


def _texts(job: Job, wanted: set[str]) -> Iterator[tuple[str, str]]:
    """(id, beginning) of the documents wanted."""
    prefixes = tuple({identity.rpartition("/")[0] for identity in wanted})
    for piece in job.pieces:
        if f"{piece.source.name}/{piece.number}" in prefixes:
            rows = pq.ParquetFile(staged_path(job, piece)).metadata.num_rows
            for batch in read_texts(job, piece, np.ones(rows, dtype=bool)):
                yield from ((identity, text[:EXCERPT]) for identity, text in zip(batch.ids, batch.texts, strict=True) if identity in wanted)

