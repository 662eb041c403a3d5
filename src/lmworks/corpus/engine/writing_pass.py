"""The last pass: writes documents to train/ and validation/, and every decision to decisions/."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lmworks.corpus.contamination import Match
from lmworks.corpus.document import Document
from lmworks.corpus.engine.decisions import DECISIONS, DOCUMENTS, parquet_writer, row_groups
from lmworks.corpus.engine.decontamination_pass import contaminated_documents, contaminated_documents_inputs
from lmworks.corpus.engine.dedup_decisions import DedupDecisions, staged_path
from lmworks.corpus.engine.job import Advance, Job, Piece
from lmworks.corpus.engine.reading_pass import read_inputs
from lmworks.corpus.engine.step_runner import ContaminatedItems, Counts, Samples, StepCounts, count
from lmworks.corpus.histogram import Histogram
from lmworks.corpus.read.part import EXCERPT
from lmworks.corpus.transform.quality import bucket_of
from lmworks.io.files import sha256_file, write_json
from lmworks.io.run_layout import COLUMNS, part_path
from lmworks.recipe.changes import as_tree

MOST_PASSAGES = 1000


def write_inputs(job: Job, piece: Piece) -> Any:
    buckets = [as_tree(bucket) for bucket in piece.source.buckets]
    decontaminate = job.recipe.corpus.decontaminate
    kept = [buckets, piece.source.bucket_by, decontaminate.action if decontaminate else None]
    return [read_inputs(job, piece), DedupDecisions.digest(job, piece), contaminated_documents_inputs(job, piece), kept]


def outputs(job: Job, piece: Piece) -> list[Path]:
    """All files that the part may write in train/ and validation/."""
    return [part_path(job.out, split, output, piece.number) for split in ("train", "validation") for output in piece.source.outputs]


def decisions_path(job: Job, piece: Piece) -> Path:
    """decisions/SOURCE/PART.parquet"""
    return job.out / "decisions" / f"{piece}.parquet"


def write_part(job: Job, piece: Piece, advance: Advance) -> None:
    """Write the kept documents of a part, and the decision about every document."""
    _PartWriter(job, piece).run(advance)


class _PartWriter:
    def __init__(self, job: Job, piece: Piece) -> None:
        self._job, self._piece = job, piece
        self._decisions = DedupDecisions.load(job, piece)
        self._contaminated = contaminated_documents(job, piece)
        decontaminate = job.recipe.corpus.decontaminate
        self._drops_contaminated = decontaminate is not None and decontaminate.action != "report"
        self._dedup, self._decontaminate = StepCounts("dedup"), StepCounts("decontaminate")
        self._kept: dict[str, Counts] = {"train": {}, "validation": {}}
        self._rejected = Samples()
        self._contaminated_originals: dict[str, str] = {}  # id of a dropped document to the item in it; its variants are dropped too
        self._passages: list[dict[str, str]] = []
        self._contaminated_items: dict[str, ContaminatedItems] = {}
        self._outcomes: list[tuple[str, ...]] = []  # fate, reason, detail, copy of
        self._distinct_outcomes: dict[tuple[str, ...], tuple[str, ...]] = {}  # equal tuples are stored once

    def run(self, advance: Advance) -> None:
        job, piece = self._job, self._piece
        for path in outputs(job, piece):
            path.unlink(missing_ok=True)
        with ExitStack() as stack:
            open_: dict[Path, pq.ParquetWriter] = {}
            total = max(len(self._decisions.held), 1)
            for first, rows in row_groups(staged_path(job, piece)):
                places: dict[tuple[str, str], list[int]] = {}
                for place, document in enumerate(_documents(rows)):
                    if where := self._decide(first + place, document):
                        places.setdefault(where, []).append(place)
                rows = self._without_passages(first, rows)
                for (split, output), chosen in places.items():
                    path = part_path(job.out, split, output, piece.number)
                    if path not in open_:
                        open_[path] = stack.enter_context(parquet_writer(path))
                    open_[path].write_table(rows.take(chosen).cast(DOCUMENTS))
                advance(piece.bytes * rows.num_rows // total, rows.num_rows)
        statistics = self._write_decisions()
        write_json(
            job.path("write", piece, ".counts.json"),
            {
                "steps": [asdict(self._dedup), asdict(self._decontaminate)],
                **{split: {output: asdict(one) for output, one in found.items()} for split, found in self._kept.items()},
                "rejected": self._rejected.rows,
                "contamination": self._passages,
                "touched": {name: one.as_json() for name, one in self._contaminated_items.items()},
                "statistics": statistics,
                "files": {str(path.relative_to(job.out)): sha256_file(path) for path in outputs(job, piece) if path.exists()},
            },
        )

    def _decide(self, row: int, document: Document) -> tuple[str, str] | None:
        """(split, output) of a document; None if it is dropped."""
        source, size = self._piece.source, len(document.text.encode())
        if row in self._decisions.cuts:
            document = document.with_text(self._decisions.cuts[row])
        reason, copy_of = self._decisions.reasons[row], self._decisions.copies[row]
        self._dedup.came.add(size)
        if reason:
            count(self._dedup.dropped, reason, size)
            self._reject(document, "dedup", reason, copy_of=copy_of)
            return None
        if row in self._decisions.cuts:
            before, size = size, len(document.text.encode())
            self._dedup.edited += size - before
        self._decontaminate.came.add(size)
        if leaked := self._contaminated_originals.get(str(document.facts.get("variant_of", ""))):
            count(self._decontaminate.dropped, "contaminated", size)
            self._reject(document, "decontaminate", "contaminated", detail=f"as its original: {leaked}")
            return None
        if matches := self._contaminated.get(row):
            self._record_contamination(document, matches)
            if self._drops_contaminated:
                longest = matches[0]
                self._contaminated_originals[document.id] = longest.against
                count(self._decontaminate.dropped, "contaminated", size)
                self._reject(document, "decontaminate", "contaminated", detail=longest.against, passage=_passage(document, longest))
                return None
        split = "validation" if self._decisions.held[row] else "train"
        bucket = bucket_of(document, source)
        output = f"{source.name}.{bucket}" if bucket else source.name
        count(self._kept[split], output, size)
        self._record_outcome(split, "", "", "")
        return split, output

    def _without_passages(self, first: int, rows: pa.Table) -> pa.Table:
        if not any(first <= row < first + rows.num_rows for row in self._decisions.cuts):
            return rows
        texts = [self._decisions.cuts.get(first + place, text) for place, text in enumerate(rows["text"].to_pylist())]
        return rows.set_column(rows.schema.get_field_index("text"), "text", pa.array(texts, pa.string()))

    def _reject(self, document: Document, step: str, reason: str, detail: str = "", copy_of: str | None = None, passage: str = "") -> None:
        self._record_outcome(step, reason, detail, copy_of or "")
        more = {"copy_of": copy_of, "against": detail, "passage": passage}
        self._rejected.add(document.source, reason, document.id, document.origin, document.text, **more)

    def _record_outcome(self, *end: str) -> None:
        self._outcomes.append(self._distinct_outcomes.setdefault(end, end))

    def _record_contamination(self, document: Document, matches: Sequence[Match]) -> None:
        for name in {match.set for match in matches}:
            items = {match.against for match in matches if match.set == name}
            self._contaminated_items.setdefault(name, ContaminatedItems()).add(1, items)
        if len(self._passages) < MOST_PASSAGES:
            longest = matches[0]
            self._passages.append({"id": document.id, "against": longest.against, "passage": _passage(document, longest)})

    def _write_decisions(self) -> dict[str, Any]:
        """Fill in the rows of documents that no step dropped; returns the distributions of the statistics."""
        path, outcomes = self._job.path("read", self._piece, ".decisions.parquet"), iter(self._outcomes)
        schema = pq.read_schema(path)
        measured = {name: {"read": Histogram(), "train": Histogram()} for name in schema.names[len(DECISIONS) :]}
        with parquet_writer(decisions_path(self._job, self._piece), schema) as out:
            for _, table in row_groups(path):
                undecided = pc.equal(table["fate"], "").combine_chunks()
                filled_in = list(islice(outcomes, pc.sum(undecided).as_py() or 0))
                for name, values in zip(("fate", "reason", "detail", "copy_of"), zip(*filled_in, strict=True), strict=False):
                    filled = pc.replace_with_mask(table[name].combine_chunks(), undecided, pa.array(values, pa.string()))
                    table = table.set_column(table.schema.get_field_index(name), name, filled)
                out.write_table(table)
                in_training = pc.equal(table["fate"], "train")
                for name, of in measured.items():
                    of["read"].add(table[name].drop_null().to_pylist())
                    of["train"].add(table[name].filter(in_training).drop_null().to_pylist())
        return {name: {kind: one.as_json() for kind, one in of.items()} for name, of in measured.items()}


def _passage(document: Document, match: Match) -> str:
    return document.text[match.start : match.end][:EXCERPT]


def _documents(rows: pa.Table) -> Iterator[Document]:
    columns = [rows.column(name).to_pylist() for name in COLUMNS]
    for identity, text, source, domain, language, origin, facts in zip(*columns, strict=True):
        yield Document(identity, text, origin, source, domain, language, json.loads(facts))
