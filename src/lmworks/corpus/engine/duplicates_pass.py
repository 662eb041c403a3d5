"""Duplicates over all sources: exact duplicates by key, near-duplicates per band, and the clusters of both.

The pass `resolve_duplicates`, one task over all documents: which duplicates are dropped, and which documents are held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa

from lmworks.corpus.dedup.near import (
    Clusters,
    StackedArrays,
    candidates,
    classify_pairs,
    distinct_shingles,
    jaccard,
    shingles,
    unique_pairs,
)
from lmworks.corpus.dedup.semantic import semantic_duplicates
from lmworks.corpus.dedup.signatures import find_copies
from lmworks.corpus.engine.assembling import require_documents
from lmworks.corpus.engine.decisions import parquet_writer
from lmworks.corpus.engine.dedup_decisions import DEDUP_DECISIONS, StagedRows, dedup_decisions_path, read_texts, resolve_duplicates_inputs
from lmworks.corpus.engine.job import Advance, Job
from lmworks.corpus.engine.reading_pass import held_out
from lmworks.corpus.units import units
from lmworks.io.files import atomic_path, write_json

REASONS = ("", "duplicate", "duplicate_url", "near_duplicate", "semantic_duplicate", "held_out_original")
_BYTES_PER_BAND = 256_000_000  # of input
_NONE, _SAME_TEXT, _SAME_URL, _NEAR, _SEMANTIC, HELD = range(6)


def find_exact_duplicates(job: Job, task: str, advance: Advance) -> None:
    """Write pairs of (copy, first): rows whose text or URL equals that of an earlier row, if the recipe drops such copies."""
    rows, dedup = StagedRows(job), job.recipe.corpus.dedup
    found = {}
    for name, wanted in (("exact", dedup.exact), ("url", dedup.url)):
        pairs = np.zeros((0, 2), np.int64)
        if wanted:  # variants have the URL of their original
            keys = [one.urls if name == "url" else one.texts for one in rows.signatures]
            pairs = find_copies(np.concatenate([np.zeros((0, 2), np.uint64), *keys]))
            pairs = _without_variant_pairs(job, rows, pairs) if name == "url" else pairs
        found[name] = pairs[_drops_duplicates(rows, name)[pairs[:, 0]]]
    with atomic_path(_exact_duplicates_path(job)) as aside, open(aside, "wb") as handle:
        np.savez(handle, **found)  # type: ignore[arg-type]


def _exact_duplicates_path(job: Job) -> Path:
    return job.path("exact_duplicates", "all", ".npz")


def band_tasks(job: Job) -> Sequence[int]:
    """The tasks of `near_duplicates`: one per band; fewer for small corpora, where reading the signatures takes most of the time."""
    if not job.sketching:
        return ()
    return range(min(job.sketching.bands, 1 + sum(piece.bytes for piece in job.pieces) // _BYTES_PER_BAND))


def find_near_duplicates(job: Job, task: int, advance: Advance) -> None:
    """Compare documents that agree in a band; write the pairs that are certainly near-duplicates and those in doubt."""
    assert job.sketching
    rows = StagedRows(job)
    sketches, limits_N = StackedArrays([one.sketches for one in rows.signatures]), thresholds(job, rows)
    with np.load(_exact_duplicates_path(job)) as pairs:
        gone = pairs["exact"][:, 0]
    found = []
    for band in range(task, job.sketching.bands, len(band_tasks(job))):
        keys = np.concatenate([np.zeros(0, np.uint64), *(one.band(band) for one in rows.signatures)])
        keys[gone] = 0  # a copy has the same pairs as its original, and would fill every band
        found.append(classify_pairs(_without_variant_pairs(job, rows, candidates(keys)), sketches, limits_N, job.sketching))
    sure, doubtful = (unique_pairs(np.concatenate(pairs)) for pairs in zip(*found, strict=True))
    with atomic_path(job.path("near_duplicates", task, ".npz")) as aside, open(aside, "wb") as handle:
        np.savez(handle, sure=sure, doubtful=doubtful)


def _without_variant_pairs(job: Job, rows: StagedRows, pairs: np.ndarray) -> np.ndarray:
    """The pairs, without those between variants of one document unless the recipe compares variants."""
    if job.recipe.corpus.dedup.variants:
        return pairs
    return pairs[rows.originals[pairs[:, 0]] != rows.originals[pairs[:, 1]]]


def thresholds(job: Job, rows: StagedRows) -> np.ndarray:
    """(N,) the similarity at which a row is a near-duplicate of an earlier one; infinity for sources that keep near-duplicates."""
    node = job.recipe.corpus.dedup.minhash
    found = np.full(len(rows), np.inf, dtype=np.float32)
    for number, piece in enumerate(rows.pieces):
        own = piece.source.dedup
        if node and own.minhash:
            found[rows.span(number)] = node.threshold if own.threshold is None else own.threshold
    return found


@dataclass(frozen=True)
class DuplicateRows:
    """Per row: why it is a duplicate (an index into `REASONS`), and the first row of its cluster; and the memory used, in bytes per
    document.
    """

    reasons: np.ndarray
    originals: np.ndarray
    bytes_per_document: float


def join_duplicates(job: Job, rows: StagedRows) -> DuplicateRows:
    """Join the pairs of all bands with those of equal texts and URLs.

    A row is a near-duplicate if it is similar enough to an earlier row. Pairs in doubt are compared only if their later row is not a
    near-duplicate yet.
    """
    dedup, count = job.recipe.corpus.dedup, len(rows)
    reasons = np.zeros(count, dtype=np.uint8)
    clusters = Clusters(count)
    held = 40 * count  # both halves of all text keys, unsorted and sorted, and the sort order
    if job.sketching:
        doubtful = np.zeros((0, 2), dtype=np.int64)
        for task in band_tasks(job):
            with np.load(job.path("near_duplicates", task, ".npz")) as found:
                clusters.join(found["sure"])
                reasons[found["sure"][:, 1]] = _NEAR
                doubtful = unique_pairs(np.concatenate((doubtful, found["doubtful"])))
        doubtful = doubtful[reasons[doubtful[:, 1]] == _NONE]
        held = max(held, 28 * count + doubtful.nbytes)  # keys of a band, unsorted and sorted, the sort order, and the limits
        near = _confirm_near_duplicates(job, rows, doubtful, thresholds(job, rows))
        clusters.join(near)
        reasons[near[:, 1]] = _NEAR
    if dedup.semantic and count:
        vectors = StackedArrays([one.vectors for one in rows.signatures if len(one)])
        firsts = semantic_duplicates(vectors, dedup.semantic, job.recipe.seed, None if dedup.variants else rows.originals)
        alike = np.flatnonzero((firsts != np.arange(count)) & _drops_duplicates(rows, "semantic"))
        clusters.join(np.stack((firsts[alike], alike), axis=1))
        reasons[alike[reasons[alike] == _NONE]] = _SEMANTIC
    with np.load(_exact_duplicates_path(job)) as found:
        for name, reason in (("url", _SAME_URL), ("exact", _SAME_TEXT)):
            clusters.join(found[name])
            reasons[found[name][:, 0]] = reason
    reasons[clusters.firsts == np.arange(count)] = _NONE
    firsts = clusters.firsts.copy()
    lost = np.flatnonzero((reasons == _NONE) & (reasons[rows.originals] != _NONE))  # a variant is dropped with its original
    reasons[lost], firsts[lost] = reasons[rows.originals[lost]], firsts[rows.originals[lost]]
    return DuplicateRows(reasons, firsts, (held + reasons.nbytes + clusters.firsts.nbytes) / max(count, 1))


def _drops_duplicates(rows: StagedRows, name: str) -> np.ndarray:
    """(N,) whether the source of each row drops copies of this kind."""
    found = np.zeros(len(rows), dtype=bool)
    for number, piece in enumerate(rows.pieces):
        found[rows.span(number)] = getattr(piece.source.dedup, name)
    return found


def _confirm_near_duplicates(job: Job, rows: StagedRows, pairs: np.ndarray, limits_N: np.ndarray) -> np.ndarray:
    """The pairs in doubt that are near-duplicates by the exact Jaccard similarity of their texts.

    Their shingles are kept in a file during the comparison, so that memory does not grow with the text.
    """
    if not len(pairs):
        return pairs
    assert job.sketching
    wanted = np.unique(pairs)
    counts = []
    with TemporaryFile(dir=job.staging) as file:
        for number, piece in enumerate(rows.pieces):
            span = rows.span(number)
            chosen = np.zeros(span.stop - span.start, dtype=bool)
            chosen[wanted[(wanted >= span.start) & (wanted < span.stop)] - span.start] = True
            for batch in read_texts(job, piece, chosen) if chosen.any() else ():
                hashes, bounds = shingles(units(batch.texts, "lines"), job.sketching.ngram, range(len(batch.texts)))
                values, ends = distinct_shingles(hashes, bounds)
                values.tofile(file)
                counts.append(np.diff(ends))
        bounds = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
        file.flush()
        values = np.memmap(file, dtype=np.uint32, mode="r") if bounds[-1] else np.zeros(0, np.uint32)
        alike = jaccard(pairs, wanted, values, bounds)
    return pairs[alike >= limits_N[pairs[:, 1]]]


def near_duplicates_inputs(job: Job, task: int) -> Any:
    return [resolve_duplicates_inputs(job, "all"), task, len(band_tasks(job))]


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
        chosen = held_out(kept["key"], kept["bytes"], corpus.validation_fraction, int(corpus.max_validation_bytes))
        held[span.start + free[chosen]] = True
    return held
