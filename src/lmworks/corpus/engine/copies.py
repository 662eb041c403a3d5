"""Who is a copy of whom, over all sources: tasks that take bands for near-duplicates, then one that joins what they have found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmworks.corpus.dedup.clusters import Clusters
from lmworks.corpus.dedup.keys import copies
from lmworks.corpus.dedup.near import Stacked, candidates, distinct, jaccard, weigh
from lmworks.corpus.dedup.sketch import shingles
from lmworks.corpus.engine.fates import Rows, decide_inputs, texts_of
from lmworks.corpus.engine.job import Job
from lmworks.corpus.engine.task import Advance
from lmworks.corpus.semantic import duplicates
from lmworks.corpus.units import units
from lmworks.files import atomic_path

REASONS = ("", "duplicate", "duplicate_url", "near_duplicate", "semantic_duplicate")
_BYTES_PER_BAND = 256_000_000  # of input
_NONE, _SAME_TEXT, _SAME_URL, _NEAR, _SEMANTIC = range(5)


def meetings(job: Job) -> Sequence[int]:
    """The tasks of `meet`: one for each band, fewer for small corpora, where reading the traces is most of the work."""
    if not job.sketching:
        return ()
    return range(min(job.sketching.bands, 1 + sum(piece.bytes for piece in job.pieces) // _BYTES_PER_BAND))


def meet(job: Job, task: int, advance: Advance) -> None:
    """Which documents agree in a band, and how alike they are: pairs of rows that are surely near-duplicates, and those in doubt."""
    assert job.sketching
    rows = Rows(job)
    sketches, limits_N = Stacked([one.sketches for one in rows.traces]), limits(job, rows)
    found = []
    for band in range(task, job.sketching.bands, len(meetings(job))):
        keys = np.concatenate([np.zeros(0, np.uint64), *(one.band(band) for one in rows.traces)])
        found.append(weigh(candidates(keys), sketches, limits_N, job.sketching))
    sure, doubtful = (np.unique(np.concatenate(pairs), axis=0) for pairs in zip(*found, strict=True))
    with atomic_path(job.path("meet", task, ".npz")) as aside, open(aside, "wb") as handle:
        np.savez(handle, sure=sure, doubtful=doubtful)


def limits(job: Job, rows: Rows) -> np.ndarray:
    """(N,) the similarity from which a row is a near-duplicate of an earlier one; infinity for sources that keep theirs."""
    node = job.recipe.corpus.dedup.minhash
    found = np.full(len(rows), np.inf, dtype=np.float32)
    for number, piece in enumerate(rows.pieces):
        own = piece.source.dedup
        if node and own.minhash:
            found[rows.span(number)] = node.threshold if own.threshold is None else own.threshold
    return found


@dataclass(frozen=True)
class Copies:
    """By row: why it is a copy (a place in `REASONS`), and the first row of its cluster; and the bytes held for each document."""

    reasons: np.ndarray
    originals: np.ndarray
    bytes_per_document: float


def find(job: Job, rows: Rows) -> Copies:
    """Join the pairs of all bands with those of equal texts and addresses."""
    dedup, count = job.recipe.corpus.dedup, len(rows)
    reasons = np.zeros(count, dtype=np.uint8)
    clusters = Clusters(count)
    held = reasons.nbytes + clusters.firsts.nbytes
    if job.sketching:
        found = [np.load(job.path("meet", task, ".npz")) for task in meetings(job)]
        sure = np.unique(np.concatenate([one["sure"] for one in found]), axis=0)
        doubtful = np.unique(np.concatenate([one["doubtful"] for one in found]), axis=0)
        held += sure.nbytes + doubtful.nbytes + 12 * count  # a band's keys and the limits, as `meet` holds them
        near = np.concatenate((sure, _settled(job, rows, doubtful, limits(job, rows))))
        clusters.join(near)
        reasons[near[:, 1]] = _NEAR
    if dedup.semantic and count:
        firsts = duplicates(Stacked([one.vectors for one in rows.traces if len(one)]), dedup.semantic, job.recipe.seed)
        alike = np.flatnonzero((firsts != np.arange(count)) & _allowed(rows, "semantic"))
        clusters.join(np.stack((firsts[alike], alike), axis=1))
        reasons[alike[reasons[alike] == _NONE]] = _SEMANTIC
    for wanted, name, reason in ((dedup.url, "url", _SAME_URL), (dedup.exact, "exact", _SAME_TEXT)):
        if not wanted:
            continue
        keys = [one.urls if name == "url" else one.texts for one in rows.traces]
        pairs = copies(np.concatenate([np.zeros((0, 2), np.uint64), *keys]))
        pairs = pairs[_allowed(rows, name)[pairs[:, 0]]]
        clusters.join(pairs)
        reasons[pairs[:, 0]] = reason
        held = max(held, 16 * count + reasons.nbytes + clusters.firsts.nbytes)
    reasons[clusters.firsts == np.arange(count)] = _NONE
    return Copies(reasons, clusters.firsts, held / max(count, 1))


def _allowed(rows: Rows, name: str) -> np.ndarray:
    """(N,) whether copies of this kind may be dropped of the row's source."""
    found = np.zeros(len(rows), dtype=bool)
    for number, piece in enumerate(rows.pieces):
        found[rows.span(number)] = getattr(piece.source.dedup, name)
    return found


def _settled(job: Job, rows: Rows, pairs: np.ndarray, limits_N: np.ndarray) -> np.ndarray:
    """The pairs of those in doubt that are near-duplicates by the exact similarity of their texts."""
    if not len(pairs):
        return pairs
    assert job.sketching
    wanted = np.unique(pairs)
    values, counts = [], []
    for number, piece in enumerate(rows.pieces):
        span = rows.span(number)
        chosen = np.zeros(span.stop - span.start, dtype=bool)
        chosen[wanted[(wanted >= span.start) & (wanted < span.stop)] - span.start] = True
        for batch in texts_of(job, piece, chosen) if chosen.any() else ():
            hashes, bounds = shingles(units(batch.texts), job.sketching.ngram, range(len(batch.texts)))
            some, ends = distinct(hashes, bounds)
            values.append(some)
            counts.append(np.diff(ends))
    bounds = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
    alike = jaccard(pairs, wanted, np.concatenate(values), bounds)
    return pairs[alike >= limits_N[pairs[:, 1]]]


def meet_inputs(job: Job, task: int) -> Any:
    return [decide_inputs(job, "all"), task, len(meetings(job))]
