"""Decontamination in parts: what is protected, where each part touches it, which of that is boilerplate, and who must go.

The protected texts are the held-out documents and the evaluation texts. Each part is scanned alone; what the parts have found is added
up, because a run that many documents share is no leak; then each part judges its own suspects as it is written.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lmworks.corpus.cleaning import clean
from lmworks.corpus.contamination import Decontaminator, Findings, Match
from lmworks.corpus.engine.dedup_decisions import Fates, texts_of
from lmworks.corpus.engine.job import Job, Piece
from lmworks.corpus.engine.marker import file_digest
from lmworks.corpus.engine.passes.reading import read_inputs
from lmworks.corpus.engine.tables import save_array, writing
from lmworks.corpus.engine.task import Advance
from lmworks.files import write_json

EVALUATION = "evaluation.parquet"
PROTECTED = pa.schema([("name", pa.string()), ("text", pa.string()), ("answer", pa.string()), ("evaluation", pa.bool_())])
_BATCH = 1024
_MOST_WIDESPREAD = 50


def on(job: Job) -> bool:
    """Whether there is a gate."""
    return job.recipe.corpus.decontaminate is not None


def protect_inputs(job: Job, task: str) -> Any:
    return [job.evaluation, [[str(piece), Fates.digest(job, piece), read_inputs(job, piece)] for piece in job.pieces]]


def protect(job: Job, task: str, advance: Advance) -> None:
    """Put the held-out documents of all parts and the evaluation texts into one file."""
    with writing(_protected(job), PROTECTED) as out:
        for piece in job.pieces:
            fates = Fates.load(job, piece)
            if fates.held.any():
                for batch in texts_of(job, piece, fates.held):
                    count = len(batch.ids)
                    out.write_table(pa.table([batch.ids, batch.texts, [""] * count, [False] * count], schema=PROTECTED))
        with pq.ParquetFile(job.staging / EVALUATION) as file:
            for rows in file.iter_batches(_BATCH):
                out.write_batch(rows)


def _protected(job: Job) -> Path:
    return job.path("protect", "all", ".parquet")


def _gate(job: Job) -> Decontaminator:
    assert job.recipe.corpus.decontaminate, "asked for where there is a gate"
    path = _protected(job)
    status = path.stat()
    return _made(path, status.st_size, status.st_mtime_ns, job.recipe.corpus.decontaminate.ngram)


@lru_cache(maxsize=1)
def _made(path: Path, size: int, changed: int, ngram: int) -> Decontaminator:
    gate = Decontaminator(ngram)
    with pq.ParquetFile(path) as file:
        for rows in file.iter_batches(_BATCH):
            for evaluation in (False, True):
                of_kind = rows.filter(pa.compute.equal(rows["evaluation"], evaluation))
                names, texts, answers = (of_kind[name].to_pylist() for name in ("name", "text", "answer"))
                gate.protect(names, [clean(text) for text in texts], [clean(answer) for answer in answers], evaluation=evaluation)
    return gate


def scan_inputs(job: Job, piece: Piece) -> Any:
    return [read_inputs(job, piece), Fates.digest(job, piece), file_digest(_protected(job)), _ngram(job)]


def _ngram(job: Job) -> int | None:
    return job.recipe.corpus.decontaminate.ngram if job.recipe.corpus.decontaminate else None


def scan(job: Job, piece: Piece, advance: Advance) -> None:
    """Where the training documents of a part touch protected text."""
    gate, fates = _gate(job), Fates.load(job, piece)
    total = max(int(fates.learnt.sum()), 1)
    scanned: list[tuple[int, Findings]] = []
    count = 0
    for batch in texts_of(job, piece, fates.learnt, fates.cuts):
        scanned.append((count, gate.scan(batch.texts)))
        count += len(batch.texts)
        advance(piece.bytes * len(batch.texts) // total, len(batch.texts))
    Findings.joined(scanned).save(_scanned(job, piece))


def _scanned(job: Job, piece: Piece) -> Path:
    return job.path("scan", piece, ".npy")


def common_inputs(job: Job, task: str) -> Any:
    return [[str(piece), scan_inputs(job, piece)] for piece in job.pieces]


def common(job: Job, task: str, advance: Advance) -> None:
    """Add up what the parts have found: which runs are in many documents, with the most frequent of them to be looked at."""
    gate = _gate(job)
    seen = gate.seen(Findings.load(_scanned(job, piece)) for piece in job.pieces)
    save_array(_common(job), seen)
    told = {
        "protected": gate.protected,
        "trivial": gate.trivial,
        "widespread": [asdict(one) for one in gate.widespread(seen, _MOST_WIDESPREAD)],
        "shared": [asdict(one) for one in gate.shared()],
    }
    write_json(job.path("common", "all", ".found.json"), told)


def _common(job: Job) -> Path:
    return job.path("common", "all", ".npy")


def verdict_inputs(job: Job, piece: Piece) -> Any:
    """What decides who of a part must go."""
    return [file_digest(_scanned(job, piece)), file_digest(_common(job)), file_digest(_protected(job))] if on(job) else None


def verdicts(job: Job, piece: Piece) -> dict[int, list[Match]]:
    """The training documents of a part that must go, by their row in it, and the passages for which, longest first."""
    if not on(job):
        return {}
    gate, fates, seen = _gate(job), Fates.load(job, piece), np.load(_common(job))
    rows = np.flatnonzero(fates.learnt)[gate.suspects(Findings.load(_scanned(job, piece)), seen)]
    chosen = np.zeros(len(fates.held), dtype=bool)
    chosen[rows] = True
    texts = (text for batch in texts_of(job, piece, chosen, fates.cuts) for text in batch.texts)
    judged = {row: gate.judge(text, seen) for row, text in zip(rows.tolist(), texts, strict=True)}
    return {row: matches for row, matches in judged.items() if matches}
