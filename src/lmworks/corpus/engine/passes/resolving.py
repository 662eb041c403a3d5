"""The pass `resolve_duplicates`, one task over all documents: which duplicates are dropped, and which documents are held out."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from lmworks.corpus.engine.assembling import require_documents
from lmworks.corpus.engine.dedup_decisions import DEDUP_DECISIONS, StagedRows, dedup_decisions_path
from lmworks.corpus.engine.job import Job
from lmworks.corpus.engine.passes.duplicates import HELD, REASONS, join_duplicates
from lmworks.corpus.engine.tables import parquet_writer
from lmworks.corpus.engine.task import Advance
from lmworks.corpus.sampling import held_out
from lmworks.files import write_json


def resolve_duplicates(job: Job, task: str, advance: Advance) -> None:
    """Write the decision about each document of each part. Raises UserError for a source without a usable document."""
    require_documents(job)
    rows = StagedRows(job)
    duplicates = join_duplicates(job, rows)
    held = _held(job, rows, duplicates.reasons > 0)
    of_held_out = (duplicates.reasons == 0) & held[rows.originals] & ~held  # variants of held-out documents
    duplicates.reasons[of_held_out], duplicates.originals[of_held_out] = HELD, rows.originals[of_held_out]
    for number, piece in enumerate(rows.pieces):
        span = rows.span(number)
        reasons = duplicates.reasons[span].tolist()
        originals = duplicates.originals[span].tolist()
        columns = [
            pa.array([REASONS[reason] or None for reason in reasons], pa.string()),
            pa.array([rows.id(first) if reason else None for reason, first in zip(reasons, originals, strict=True)], pa.string()),
            pa.array(held[span], pa.bool_()),
        ]
        with parquet_writer(dedup_decisions_path(job, piece), DEDUP_DECISIONS) as out:
            out.write_table(pa.table(columns, schema=DEDUP_DECISIONS))
    write_json(job.path("resolve_duplicates", task, ".found.json"), {"bytes_per_document": round(duplicates.bytes_per_document, 1)})


def _held(job: Job, rows: StagedRows, copy: np.ndarray) -> np.ndarray:
    """(N,) the held-out rows: some of each source; never a copy or a variant."""
    corpus = job.recipe.corpus
    held = np.zeros(len(rows), dtype=bool)
    for source in job.sources:
        of_source = [number for number, piece in enumerate(rows.pieces) if piece.source.name == source.name]
        if not of_source:
            continue
        span = slice(rows.span(of_source[0]).start, rows.span(of_source[-1]).stop)
        free = np.flatnonzero(~copy[span] & (rows.originals[span] == np.arange(span.start, span.stop)))
        kept = np.concatenate([rows.kept[number] for number in of_source])[free]
        chosen = held_out(kept["key"], kept["bytes"], corpus.validation_fraction, int(corpus.validation_bytes))
        held[span.start + free[chosen]] = True
    return held
