"""Duplicates over all sources: exact ones by key, near-duplicates band by band, and the clusters that both form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from lmworks.corpus.dedup.clusters import Clusters
from lmworks.corpus.dedup.keys import copies
from lmworks.corpus.dedup.near import Stacked, candidates, classify_pairs, distinct, jaccard, unique_pairs
from lmworks.corpus.dedup.semantic import duplicates
from lmworks.corpus.dedup.sketch import shingles
from lmworks.corpus.engine.dedup_decisions import StagedRows, resolve_duplicates_inputs, texts_of
from lmworks.corpus.engine.job import Job
from lmworks.corpus.engine.task import Advance
from lmworks.corpus.units import units
from lmworks.files import atomic_path

REASONS = ("", "duplicate", "duplicate_url", "near_duplicate", "semantic_duplicate", "held_out_original")
_BYTES_PER_BAND = 256_000_000  # of input
_NONE, _SAME_TEXT, _SAME_URL, _NEAR, _SEMANTIC, HELD = range(6)


def find_exact_duplicates(job: Job, task: str, advance: Advance) -> None:
    """Write pairs of (copy, first): rows whose text or URL an earlier row has, where the recipe drops such copies."""
    rows, dedup = StagedRows(job), job.recipe.corpus.dedup
    found = {}
    for name, wanted in (("exact", dedup.exact), ("url", dedup.url)):
        pairs = np.zeros((0, 2), np.int64)
        if wanted:  # variants have the address of their original
            keys = [one.urls if name == "url" else one.texts for one in rows.traces]
            pairs = copies(np.concatenate([np.zeros((0, 2), np.uint64), *keys]))
            pairs = _without_variant_pairs(job, rows, pairs) if name == "url" else pairs
        found[name] = pairs[_droppable(rows, name)[pairs[:, 0]]]
    with atomic_path(_exact_duplicates_path(job)) as aside, open(aside, "wb") as handle:
        np.savez(handle, **found)  # type: ignore[arg-type]


def _exact_duplicates_path(job: Job) -> Path:
    return job.path("exact_duplicates", "all", ".npz")


def band_tasks(job: Job) -> Sequence[int]:
    """The tasks of `near_duplicates`: one for each band, fewer for small corpora, where reading the traces is most of the work."""
    if not job.sketching:
        return ()
    return range(min(job.sketching.bands, 1 + sum(piece.bytes for piece in job.pieces) // _BYTES_PER_BAND))


def find_near_duplicates(job: Job, task: int, advance: Advance) -> None:
    """Compare documents that agree in a band; write the pairs that are certainly near-duplicates and those in doubt."""
    assert job.sketching
    rows = StagedRows(job)
    sketches, limits_N = Stacked([one.sketches for one in rows.traces]), thresholds(job, rows)
    with np.load(_exact_duplicates_path(job)) as pairs:
        gone = pairs["exact"][:, 0]
    found = []
    for band in range(task, job.sketching.bands, len(band_tasks(job))):
        keys = np.concatenate([np.zeros(0, np.uint64), *(one.band(band) for one in rows.traces)])
        keys[gone] = 0  # a copy has the pairs of its original, and would fill every band
        found.append(classify_pairs(_without_variant_pairs(job, rows, candidates(keys)), sketches, limits_N, job.sketching))
    sure, doubtful = (unique_pairs(np.concatenate(pairs)) for pairs in zip(*found, strict=True))
    with atomic_path(job.path("near_duplicates", task, ".npz")) as aside, open(aside, "wb") as handle:
        np.savez(handle, sure=sure, doubtful=doubtful)


def _without_variant_pairs(job: Job, rows: StagedRows, pairs: np.ndarray) -> np.ndarray:
    """The pairs without those between variants of one document, unless the recipe compares variants."""
    if job.recipe.corpus.dedup.variants:
        return pairs
    return pairs[rows.originals[pairs[:, 0]] != rows.originals[pairs[:, 1]]]


def thresholds(job: Job, rows: StagedRows) -> np.ndarray:
    """(N,) the similarity from which a row is a near-duplicate of an earlier one; infinity for sources that keep theirs."""
    node = job.recipe.corpus.dedup.minhash
    found = np.full(len(rows), np.inf, dtype=np.float32)
    for number, piece in enumerate(rows.pieces):
        own = piece.source.dedup
        if node and own.minhash:
            found[rows.span(number)] = node.threshold if own.threshold is None else own.threshold
    return found


@dataclass(frozen=True)
class DuplicateRows:
    """By row: why it is a copy (a place in `REASONS`), and the first row of its cluster; and the bytes held for each document."""

    reasons: np.ndarray
    originals: np.ndarray
    bytes_per_document: float


def join_duplicates(job: Job, rows: StagedRows) -> DuplicateRows:
    """Join the pairs of all bands with those of equal texts and addresses.

    A row is a near-duplicate if an earlier row is alike; of the pairs in doubt only those are compared whose later row is none yet.
    """
    dedup, count = job.recipe.corpus.dedup, len(rows)
    reasons = np.zeros(count, dtype=np.uint8)
    clusters = Clusters(count)
    held = 40 * count  # both halves of the keys of all texts, as read and in order, and that order
    if job.sketching:
        doubtful = np.zeros((0, 2), dtype=np.int64)
        for task in band_tasks(job):
            with np.load(job.path("near_duplicates", task, ".npz")) as found:
                clusters.join(found["sure"])
                reasons[found["sure"][:, 1]] = _NEAR
                doubtful = unique_pairs(np.concatenate((doubtful, found["doubtful"])))
        doubtful = doubtful[reasons[doubtful[:, 1]] == _NONE]
        held = max(held, 28 * count + doubtful.nbytes)  # a band's keys, as read and in order, that order, and the limits
        near = _confirmed(job, rows, doubtful, thresholds(job, rows))
        clusters.join(near)
        reasons[near[:, 1]] = _NEAR
    if dedup.semantic and count:
        vectors = Stacked([one.vectors for one in rows.traces if len(one)])
        firsts = duplicates(vectors, dedup.semantic, job.recipe.seed, None if dedup.variants else rows.originals)
        alike = np.flatnonzero((firsts != np.arange(count)) & _droppable(rows, "semantic"))
        clusters.join(np.stack((firsts[alike], alike), axis=1))
        reasons[alike[reasons[alike] == _NONE]] = _SEMANTIC
    with np.load(_exact_duplicates_path(job)) as found:
        for name, reason in (("url", _SAME_URL), ("exact", _SAME_TEXT)):
            clusters.join(found[name])
            reasons[found[name][:, 0]] = reason
    reasons[clusters.firsts == np.arange(count)] = _NONE
    firsts = clusters.firsts.copy()
    lost = np.flatnonzero((reasons == _NONE) & (reasons[rows.originals] != _NONE))  # a variant goes with its original
    reasons[lost], firsts[lost] = reasons[rows.originals[lost]], firsts[rows.originals[lost]]
    return DuplicateRows(reasons, firsts, (held + reasons.nbytes + clusters.firsts.nbytes) / max(count, 1))


def _droppable(rows: StagedRows, name: str) -> np.ndarray:
    """(N,) whether copies of this kind may be dropped of the row's source."""
    found = np.zeros(len(rows), dtype=bool)
    for number, piece in enumerate(rows.pieces):
        found[rows.span(number)] = getattr(piece.source.dedup, name)
    return found


def _confirmed(job: Job, rows: StagedRows, pairs: np.ndarray, limits_N: np.ndarray) -> np.ndarray:
    """The pairs of those in doubt that are near-duplicates by the exact Jaccard similarity of their texts.

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
            for batch in texts_of(job, piece, chosen) if chosen.any() else ():
                hashes, bounds = shingles(units(batch.texts, "lines"), job.sketching.ngram, range(len(batch.texts)))
                values, ends = distinct(hashes, bounds)
                values.tofile(file)
                counts.append(np.diff(ends))
        bounds = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
        file.flush()
        values = np.memmap(file, dtype=np.uint32, mode="r") if bounds[-1] else np.zeros(0, np.uint32)
        alike = jaccard(pairs, wanted, values, bounds)
    return pairs[alike >= limits_N[pairs[:, 1]]]


def near_duplicates_inputs(job: Job, task: int) -> Any:
    return [resolve_duplicates_inputs(job, "all"), task, len(band_tasks(job))]
