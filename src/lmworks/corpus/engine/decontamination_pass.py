"""Decontamination in parts: collect protected text, scan each part for it, exempt boilerplate, and decide about each suspect document.

The protected texts are the held-out documents and the evaluation texts. Each part is scanned alone. The findings are added up, because an
n-gram in many documents is boilerplate. The suspects of each part are decided when it is written.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lmworks.corpus.contamination import Decontaminator, Findings, Match
from lmworks.corpus.engine.decisions import parquet_writer, save_array
from lmworks.corpus.engine.dedup_decisions import DedupDecisions, read_texts
from lmworks.corpus.engine.job import Advance, Job, Piece, file_digest
from lmworks.corpus.engine.reading_pass import read_inputs
from lmworks.corpus.transform.cleaning import clean
from lmworks.io.files import write_json

EVALUATION = "evaluation.parquet"
PROTECTED = pa.schema([("name", pa.string()), ("text", pa.string()), ("answer", pa.string()), ("evaluation", pa.bool_())])
_BATCH = 1024


def enabled(job: Job) -> bool:
    """Whether the recipe enables decontamination."""
    return job.recipe.corpus.decontaminate is not None


def collect_protected_inputs(job: Job, task: str) -> Any:
    return [job.evaluation, [[str(piece), DedupDecisions.digest(job, piece), read_inputs(job, piece)] for piece in job.pieces]]


def collect_protected(job: Job, task: str, advance: Advance) -> None:
    """Write the held-out documents of all parts and the evaluation texts into one file."""
    with parquet_writer(_protected_path(job), PROTECTED) as out:
        for piece in job.pieces:
            decisions = DedupDecisions.load(job, piece)
            if decisions.held.any():
                for batch in read_texts(job, piece, decisions.held):
                    count = len(batch.ids)
                    out.write_table(pa.table([batch.ids, batch.texts, [""] * count, [False] * count], schema=PROTECTED))
        with pq.ParquetFile(job.staging / EVALUATION) as file:
            for rows in file.iter_batches(_BATCH):
                out.write_batch(rows)


def _protected_path(job: Job) -> Path:
    return job.path("collect_protected", "all", ".parquet")


def _decontaminator(job: Job) -> Decontaminator:
    assert job.recipe.corpus.decontaminate, "called only if the recipe enables decontamination"
    path = _protected_path(job)
    status = path.stat()
    return _built(path, status.st_size, status.st_mtime_ns, job.recipe.corpus.decontaminate.ngram_words)


@lru_cache(maxsize=1)
def _built(path: Path, size: int, changed: int, ngram: int) -> Decontaminator:
    decontaminator = Decontaminator(ngram)
    with pq.ParquetFile(path) as file:
        for rows in file.iter_batches(_BATCH):
            for evaluation in (False, True):
                of_kind = rows.filter(pa.compute.equal(rows["evaluation"], evaluation))
                names, texts, answers = (of_kind[name].to_pylist() for name in ("name", "text", "answer"))
                decontaminator.protect(names, [clean(text) for text in texts], [clean(answer) for answer in answers], evaluation=evaluation)
    return decontaminator


def scan_contamination_inputs(job: Job, piece: Piece) -> Any:
    return [read_inputs(job, piece), DedupDecisions.digest(job, piece), file_digest(_protected_path(job)), _ngram(job)]


def _ngram(job: Job) -> int | None:
    return job.recipe.corpus.decontaminate.ngram_words if job.recipe.corpus.decontaminate else None


def scan_contamination(job: Job, piece: Piece, advance: Advance) -> None:
    """Write where the training documents of a part contain n-grams of protected text."""
    decontaminator, decisions = _decontaminator(job), DedupDecisions.load(job, piece)
    total = max(int(decisions.in_training.sum()), 1)
    scanned: list[tuple[int, Findings]] = []
    count = 0
    for batch in read_texts(job, piece, decisions.in_training, decisions.cuts):
        scanned.append((count, decontaminator.scan(batch.texts)))
        count += len(batch.texts)
        advance(piece.bytes * len(batch.texts) // total, len(batch.texts))
    Findings.joined(scanned).save(_findings_path(job, piece))


def _findings_path(job: Job, piece: Piece) -> Path:
    return job.path("scan_contamination", piece, ".npy")


def common_ngrams_inputs(job: Job, task: str) -> Any:
    return [[str(piece), scan_contamination_inputs(job, piece)] for piece in job.pieces]


def count_common_ngrams(job: Job, task: str, advance: Advance) -> None:
    """Add up the findings of all parts: count the documents of each n-gram, and collect the widespread ones for the report."""
    decontaminator = _decontaminator(job)
    document_counts = decontaminator.count_documents(Findings.load(_findings_path(job, piece)) for piece in job.pieces)
    save_array(_common_ngrams_path(job), document_counts)
    widespread, exempt = decontaminator.widespread_runs(document_counts)
    summary = {
        "protected": decontaminator.protected,
        "trivial": decontaminator.trivial,
        "widespread": [asdict(one) for one in widespread],
        "exempt": exempt,
        "shared": [asdict(one) for one in decontaminator.shared()],
    }
    write_json(job.path("common_ngrams", "all", ".found.json"), summary)


def _common_ngrams_path(job: Job) -> Path:
    return job.path("common_ngrams", "all", ".npy")


def contaminated_documents_inputs(job: Job, piece: Piece) -> Any:
    """The inputs of `contaminated_documents`."""
    if not enabled(job):
        return None
    return [file_digest(path) for path in (_findings_path(job, piece), _common_ngrams_path(job), _protected_path(job))]


def contaminated_documents(job: Job, piece: Piece) -> dict[int, list[Match]]:
    """The contaminated training documents of a part: row to the matching passages, longest first."""
    if not enabled(job):
        return {}
    decontaminator, decisions, document_counts = _decontaminator(job), DedupDecisions.load(job, piece), np.load(_common_ngrams_path(job))
    suspects = decontaminator.suspect_documents(Findings.load(_findings_path(job, piece)), document_counts)
    rows = np.flatnonzero(decisions.in_training)[suspects]
    chosen = np.zeros(len(decisions.held), dtype=bool)
    chosen[rows] = True
    texts = (text for batch in read_texts(job, piece, chosen, decisions.cuts) for text in batch.texts)
    found = {row: decontaminator.find_matches(text, document_counts) for row, text in zip(rows.tolist(), texts, strict=True)}
    return {row: matches for row, matches in found.items() if matches}
