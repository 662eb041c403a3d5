"""Cuts passages that occurred earlier out of the training documents. Runs are compared only near anchors that occur twice.

The passes write staging/ngram_anchors (hashes), staging/candidate_ngrams (document, unit and hash of every run near an anchor that occurs
twice), staging/repeated_ngrams (first units of runs that occurred earlier) and staging/cut_passages (the documents after cutting). The two
tasks that read all parts process the hashes in slices, so that their memory does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lmworks.corpus.dedup.signatures import in_slice
from lmworks.corpus.dedup.substring import anchors, candidate_runs, cut_runs, occurred_earlier, repeated_values
from lmworks.corpus.engine.decisions import parquet_writer, save_array
from lmworks.corpus.engine.dedup_decisions import CUTS, DedupDecisions, cuts_path, parts_by_priority, read_texts
from lmworks.corpus.engine.job import Advance, Job, Piece, file_digest
from lmworks.corpus.engine.reading_pass import read_inputs
from lmworks.corpus.units import Units, units

_SLICE = 1 << 25  # hashes


def _length(job: Job) -> int:
    assert job.recipe.corpus.dedup.substring
    return job.recipe.corpus.dedup.substring.min_words


def anchors_inputs(job: Job, piece: Piece) -> Any:
    return [_length(job), job.recipe.corpus.dedup.variants, DedupDecisions.digest(job, piece, cut=False), read_inputs(job, piece)]


def shared_anchors_inputs(job: Job, task: str) -> Any:
    return [[str(piece), anchors_inputs(job, piece)] for piece in job.pieces]


def candidates_inputs(job: Job, piece: Piece) -> Any:
    return [anchors_inputs(job, piece), file_digest(_shared_anchors_path(job))]


def repeated_ngrams_inputs(job: Job, task: str) -> Any:
    return [[str(piece), candidates_inputs(job, piece), piece.source.dedup.substring] for piece in parts_by_priority(job)]


def cut_passages_inputs(job: Job, piece: Piece) -> Any:
    return [anchors_inputs(job, piece), file_digest(job.path("repeated_ngrams", piece, ".npy"))]


def _training_batches(job: Job, piece: Piece, advance: Advance) -> Iterator[tuple[np.ndarray, list[str], Units]]:
    """(rows, texts, units) of the training documents of a part, in batches."""
    decisions = DedupDecisions.load(job, piece, cut=False)
    chosen = decisions.in_training
    if not job.recipe.corpus.dedup.variants:  # variants repeat their originals
        chosen = chosen & (np.load(job.path("read", piece, ".keys.npy"))["variant"] == 0)
    rows, first = np.flatnonzero(chosen), 0
    for batch in read_texts(job, piece, chosen):
        count = len(batch.texts)
        yield rows[first : first + count], batch.texts, units(batch.texts, "lines")
        advance(piece.bytes * count // max(len(rows), 1), count)
        first += count


def find_anchors(job: Job, piece: Piece, advance: Advance) -> None:
    """Write the anchors of a part's documents."""
    found = [anchors(batch, _length(job))[:, 2] for _, _, batch in _training_batches(job, piece, advance)]
    save_array(job.path("ngram_anchors", piece, ".npy"), np.concatenate([np.zeros(0, np.int64), *found]))


def find_shared_anchors(job: Job, task: str, advance: Advance) -> None:
    """Write the anchors that occur at least twice in all documents."""
    parts = [np.load(job.path("ngram_anchors", piece, ".npy"), mmap_mode="r") for piece in job.pieces]
    slices = sum(map(len, parts)) // _SLICE + 1
    found = [repeated_values(np.concatenate([part[_in(part, number, slices)] for part in parts])) for number in range(slices)]
    save_array(_shared_anchors_path(job), np.sort(np.concatenate(found)))


def _shared_anchors_path(job: Job) -> Path:
    return job.path("shared_anchors", "all", ".npy")


def _in(hashes: np.ndarray, number: int, slices: int) -> np.ndarray:
    return in_slice(np.asarray(hashes).view(np.uint64), number, slices)


def find_candidates(job: Job, piece: Piece, advance: Advance) -> None:
    """Write all runs near a shared anchor, of a part's documents."""
    shared = np.load(_shared_anchors_path(job))
    found = [np.zeros((0, 3), np.int64)]
    for rows, _, batch in _training_batches(job, piece, advance):
        near = candidate_runs(batch, _length(job), shared)
        near[:, 0] = rows[near[:, 0]]
        found.append(near)
    save_array(job.path("candidate_ngrams", piece, ".npy"), np.concatenate(found))


def find_repeated_ngrams(job: Job, task: str, advance: Advance) -> None:
    """Write which candidates occurred earlier, in the order of priority."""
    pieces = parts_by_priority(job)
    parts = [np.load(job.path("candidate_ngrams", piece, ".npy"), mmap_mode="r") for piece in pieces]
    slices = sum(map(len, parts)) // _SLICE + 1
    gone = [np.zeros(len(part), dtype=bool) for part in parts]
    for number in range(slices):
        chosen = [np.flatnonzero(_in(np.ascontiguousarray(part[:, 2]), number, slices)) for part in parts]
        found = occurred_earlier(np.concatenate([part[places, 2] for part, places in zip(parts, chosen, strict=True)]))
        for flags, places, own in zip(gone, chosen, np.split(found, np.cumsum([len(places) for places in chosen])[:-1]), strict=True):
            flags[places] = own
    for piece, part, flags in zip(pieces, parts, gone, strict=True):
        allowed = flags & piece.source.dedup.substring
        save_array(job.path("repeated_ngrams", piece, ".npy"), np.asarray(part[allowed, :2]))


def cut_passages(job: Job, piece: Piece, advance: Advance) -> None:
    """Write the documents of a part from which passages were cut."""
    found = np.load(job.path("repeated_ngrams", piece, ".npy"))
    rows_cut = np.unique(found[:, 0])
    columns: list[list[Any]] = [[], [], []]
    for rows, texts, batch in _training_batches(job, piece, advance):
        for number in np.flatnonzero(np.isin(rows, rows_cut)).tolist():
            starts = batch.starts[batch.bounds[number] : batch.bounds[number + 1]]
            text, left = cut_runs(texts[number], starts, found[found[:, 0] == rows[number], 1], _length(job))
            for column, value in zip(columns, (int(rows[number]), text, left), strict=True):
                column.append(value)
    with parquet_writer(cuts_path(job, piece), CUTS) as out:
        out.write_table(pa.table(columns, schema=CUTS))
