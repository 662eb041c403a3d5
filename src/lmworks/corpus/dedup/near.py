"""MinHash sketches with one byte per value, and the keys of their bands.

Each value of a sketch is equal in two documents with a probability of their Jaccard similarity J (Broder 1997). Sketches are computed by
fast similarity sketching (Dahlgaard, Knudsen and Thorup 2017, arXiv:1704.04370): each shingle is hashed into one bin instead of once per
value, and documents that are too short to fill all bins hash their shingles again. Only the lowest byte of a value is kept (Li and König
2010, b-bit minwise hashing); chance agreement of bytes, 1 in 256, is corrected for.

Pairs of near-duplicates: candidates from bands, similarity estimated from sketches, and exact similarity for pairs in doubt.

From pairs to clusters, in arrays: connected components, each represented by its first row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lmworks.corpus.units import Units, mix, ngrams, run_hash

_ROUNDS = 8
_FILLED = 1 << 17  # shingles at a time
_EMPTY = np.uint32(0xFFFFFFFF)
_GOLDEN = 0x9E3779B97F4A7C15
_STEP = np.uint64(0xD6E8FEB86659FD93)
_MULTIPLIERS = mix(np.arange(1, _ROUNDS + 1, dtype=np.uint64)) | np.uint64(1)
_CHANCE = 1 / 256
RECALL = 0.99


@dataclass(frozen=True)
class Sketching:
    """Parameters of sketches: n-gram length, number of values, and number of bands. Two documents are candidates if all values of a band
    are equal.
    """

    ngram: int
    values: int
    bands: int

    @classmethod
    def of(cls, ngram: int, values: int, bands: int | None, threshold: float) -> Sketching:
        """If `bands` is None, the smallest number of bands (the most selective) in which 99% of pairs exactly at `threshold` become
        candidates.
        """
        if bands is None:
            fits = [rows for rows in range(1, values + 1) if candidate_probability(threshold, values // rows, rows) >= RECALL]
            bands = values // max(fits, default=1)
        return cls(ngram, values, bands)

    @property
    def rows(self) -> int:
        """Values in a band."""
        return self.values // self.bands

    def margin(self, threshold: float) -> float:
        """The distance of an estimate from `threshold` at which a pair is certainly on that side of it (3.5 standard deviations)."""
        return 3.5 * math.sqrt(threshold * (1 - threshold) / self.values)


def candidate_probability(similarity: float, bands: int, rows: int) -> float:
    """Probability that two documents of this Jaccard similarity agree in at least one band (Mining of Massive Datasets, 3.4.2)."""
    return 1 - (1 - similarity**rows) ** bands


def shingles(batch: Units, ngram: int, documents: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(hashes of the n-grams of the chosen documents, concatenated; where each document begins and ends: (D+1,)).

    A document shorter than n is one shingle; a document without units has none.
    """
    chosen = np.asarray(documents, dtype=np.int64)
    starts, stops = batch.bounds[chosen], batch.bounds[chosen + 1]
    counts = np.where(stops - starts >= ngram, stops - starts - ngram + 1, np.minimum(stops - starts, 1))
    bounds = np.concatenate(([0], np.cumsum(counts)))
    places = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], counts)
    grams = ngrams(batch.hashes, ngram)
    hashes = grams[np.minimum(places, len(grams) - 1)] if len(grams) else np.zeros(len(places), dtype=np.uint64)
    for short in np.flatnonzero((stops - starts < ngram) & (stops > starts)).tolist():
        hashes[bounds[short]] = run_hash(batch.hashes[starts[short] : stops[short]])[0]
    return hashes, bounds


def sketches(batch: Units, sketching: Sketching, documents: Sequence[int] | None = None) -> np.ndarray:
    """(D, values) uint8 sketches of all documents, or of those in `documents`. A document without units has zeros and matches nothing."""
    chosen = np.arange(batch.documents) if documents is None else np.asarray(documents, dtype=np.int64)
    hashes, bounds = shingles(batch, sketching.ngram, chosen)
    values = sketching.values
    bins = np.full(len(chosen) * values, _EMPTY, dtype=np.uint32)
    live, first = hashes, np.repeat(np.arange(0, len(bins), values), np.diff(bounds))
    for round_ in range(_ROUNDS):
        hashed = live * _MULTIPLIERS[round_]
        hashed ^= hashed >> np.uint64(32)
        least = (hashed & np.uint64(0x7FFFFFFF)).astype(np.uint32)
        hashed >>= np.uint64(32)
        hashed *= np.uint64(values)
        hashed >>= np.uint64(32)
        places = hashed.view(np.int64)
        places += first
        if round_:  # a bin that an earlier round has filled is not changed
            open_ = np.flatnonzero(bins[places] == _EMPTY)
            places, least = places[open_], least[open_]
        np.minimum.at(bins, places, least)
        unfilled = bins.reshape(len(chosen), values).max(axis=1, initial=0) == _EMPTY
        keep = np.repeat(unfilled, np.diff(bounds)) if not round_ else unfilled[first // values]
        live, first = live[keep], first[keep]
        if not len(live):
            break
    _fill_empty_bins(bins, values, hashes, bounds)
    table = bins.reshape(len(chosen), values)
    table[np.diff(bounds) == 0] = 0
    return table.astype(np.uint8)


def _fill_empty_bins(bins: np.ndarray, values: int, hashes: np.ndarray, bounds: np.ndarray) -> None:
    """Fill bins that are still empty with the minimum over all shingles of the document, under a hash function of the bin."""
    multipliers = mix(np.arange(values, dtype=np.uint64) + np.uint64(_GOLDEN)) | np.uint64(1)
    empty = np.flatnonzero(bins == _EMPTY)
    counts = np.diff(bounds)[empty // values]
    empty, counts = empty[counts > 0], counts[counts > 0]
    total = np.cumsum(counts)
    for begin, end in pairwise([0, *(np.flatnonzero(np.diff(total // _FILLED)) + 1).tolist(), len(empty)]):
        if end == begin:
            continue
        some, each = empty[begin:end], counts[begin:end]
        ends = np.cumsum(each)
        places = np.arange(ends[-1]) + np.repeat(bounds[some // values] - (ends - each), each)
        own = hashes[places] * np.repeat(multipliers[some % values], each)
        own ^= own >> np.uint64(32)
        own &= np.uint64(0x7FFFFFFF)
        bins[some] = np.minimum.reduceat(own, ends - each)


def band_keys(sketches_DV: np.ndarray, sketching: Sketching) -> np.ndarray:
    """(bands, D) uint64: documents with equal keys in a band agree in all its values. Documents without units have the key 0."""
    keys = np.zeros((sketching.bands, len(sketches_DV)), dtype=np.uint64)
    for band, row in np.ndindex(sketching.bands, sketching.rows):
        keys[band] *= _STEP
        keys[band] += sketches_DV[:, band * sketching.rows + row]
    for band in range(sketching.bands):
        mix(keys[band])
    return keys


def similarity(left_PV: np.ndarray, right_PV: np.ndarray) -> np.ndarray:
    """(P,) estimated Jaccard similarity of pairs of sketches."""
    share = (left_PV == right_PV).mean(axis=1)
    return np.clip((share - _CHANCE) / (1 - _CHANCE), 0, 1)


NEIGHBORS = 32
_PAIRS = 1 << 14
_SHINGLES = 1 << 20


def candidates(keys_N: np.ndarray) -> np.ndarray:
    """(P, 2) rows with equal keys in one band, lower row first, ascending. Rows with the key 0 have no pairs.

    In a bucket of more than 33 rows, each row is paired with the first row and the next 32. This connects the duplicates in the bucket
    without a quadratic number of pairs.
    """
    order = np.argsort(keys_N, kind="stable")
    order = order[np.searchsorted(keys_N[order], 1) :] if len(order) else order
    ranked = keys_N[order]
    crowd = np.zeros(len(order), dtype=bool)
    crowd[1:] = ranked[1:] == ranked[:-1]
    crowd[:-1] |= crowd[1:]
    order, ranked = order[crowd], ranked[crowd]  # most rows are alone in their bucket and have no pairs
    bucket = np.concatenate(([0], np.cumsum(ranked[1:] != ranked[:-1])))[: len(order)]
    found = []
    for step in range(1, NEIGHBORS + 1):
        equal = bucket[step:] == bucket[:-step]
        if not equal.any():
            break
        found.append(np.stack((order[:-step][equal], order[step:][equal]), axis=1))
    else:
        heads = np.searchsorted(bucket, bucket, side="left")
        far = np.arange(len(order)) - heads > NEIGHBORS
        found.append(np.stack((order[heads], order), axis=1)[far])
    pairs = np.concatenate(found) if found else np.zeros((0, 2), dtype=np.int64)
    return pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]


def unique_pairs(pairs: np.ndarray) -> np.ndarray:
    """The pairs in ascending order, without repeats."""
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    return pairs[np.concatenate((np.ones(min(len(pairs), 1), dtype=bool), (pairs[1:] != pairs[:-1]).any(axis=1)))]


class StackedArrays:
    """The rows of many arrays (for example memory-mapped files) as if they were one."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = parts
        self._firsts = np.concatenate(([0], np.cumsum([len(part) for part in parts], dtype=np.int64)))

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        owner = np.searchsorted(self._firsts, rows, side="right") - 1
        order = np.argsort(owner, kind="stable")
        parts, begins = np.unique(owner[order], return_index=True)
        result = np.empty((len(rows), *self._parts[0].shape[1:]), dtype=self._parts[0].dtype)
        for part, begin, end in zip(parts.tolist(), begins.tolist(), [*begins[1:].tolist(), len(rows)], strict=True):
            span = order[begin:end]
            result[span] = self._parts[part][rows[span] - self._firsts[part]]
        return result


def classify_pairs(pairs: np.ndarray, sketches: StackedArrays, limits: np.ndarray, sketching: Sketching) -> tuple[np.ndarray, np.ndarray]:
    """(pairs that are certainly near-duplicates, pairs in doubt), by their sketches.

    A pair is a near-duplicate if its Jaccard similarity reaches the limit of its later row, `limits[pairs[:, 1]]`; infinity means never.
    """
    pairs = pairs[np.isfinite(limits[pairs[:, 1]])]
    likeness = np.empty(len(pairs))
    for first in range(0, len(pairs), _PAIRS):
        span = slice(first, first + _PAIRS)
        likeness[span] = similarity(sketches[pairs[span, 0]], sketches[pairs[span, 1]])
    limit = limits[pairs[:, 1]]
    margin = 3.5 * np.sqrt(limit * (1 - limit) / sketching.values)
    return pairs[likeness >= limit + margin], pairs[np.abs(likeness - limit) < margin]


def jaccard(pairs: np.ndarray, rows: np.ndarray, values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """(P,) exact Jaccard similarity of pairs of documents, computed in chunks.

    The distinct shingles (uint32) of document `rows[i]`, rows ascending, are `values[bounds[i]:bounds[i+1]]`.
    """
    places = np.searchsorted(rows, pairs)
    sizes = np.diff(bounds)[places]
    result = np.empty(len(pairs))
    chunk = np.cumsum(sizes.sum(axis=1)) // _SHINGLES
    for first, last in _spans(chunk):
        some, counts = places[first:last].ravel(), sizes[first:last].ravel()
        total = np.concatenate(([0], np.cumsum(counts)))
        index = np.arange(total[-1]) + np.repeat(bounds[some] - total[:-1], counts)
        pair = np.repeat(np.arange(2 * (last - first)) // 2, counts).astype(np.uint64)
        both = np.sort(pair << np.uint64(32) | values[index])
        common = np.bincount((both[1:][both[1:] == both[:-1]] >> np.uint64(32)).astype(np.int64), minlength=last - first)
        result[first:last] = common / np.maximum(sizes[first:last].sum(axis=1) - common, 1)
    return result


def _spans(labels: np.ndarray) -> list[tuple[int, int]]:
    """(first, one past the last) of each run of equal labels."""
    edges = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(labels)]
    return [(first, last) for first, last in pairwise(edges) if last > first]


def distinct_shingles(hashes: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct shingles of each document as uint32, where each document begins and ends), for `jaccard`."""
    document = np.repeat(np.arange(len(bounds) - 1, dtype=np.uint64), np.diff(bounds))
    marked = np.sort(document << np.uint64(32) | hashes >> np.uint64(32))  # np.unique takes ten times as long, because it hashes
    marked = marked[np.concatenate((marked[:1] == marked[:1], marked[1:] != marked[:-1]))]
    counts = np.bincount((marked >> np.uint64(32)).astype(np.int64), minlength=len(bounds) - 1)
    return marked.astype(np.uint32), np.concatenate(([0], np.cumsum(counts)))


class Clusters:
    """Rows joined by pairs. Pairs can be added in any order; the clusters depend on the set of pairs alone."""

    def __init__(self, count: int) -> None:
        self._first = np.arange(count, dtype=np.int64)

    def join(self, pairs_P2: np.ndarray) -> None:
        """Put the two rows of each pair into one cluster.

        Each root is linked to the smallest root that it is paired with, then all paths are compressed, until no pair has two roots
        (Shiloach and Vishkin 1982). The number of rounds is logarithmic.
        """
        while len(pairs_P2):
            roots = self._first[pairs_P2]
            apart = roots[:, 0] != roots[:, 1]
            if not apart.any():
                return
            pairs_P2, roots = pairs_P2[apart], roots[apart]
            np.minimum.at(self._first, roots.max(axis=1), roots.min(axis=1))
            self._compress_paths()

    def apart(self, pairs_P2: np.ndarray) -> np.ndarray:
        """The pairs whose rows are not in one cluster yet."""
        roots = self._first[pairs_P2]
        return pairs_P2[roots[:, 0] != roots[:, 1]]

    def _compress_paths(self) -> None:
        while True:
            shorter = self._first[self._first]
            if np.array_equal(shorter, self._first):
                return
            self._first = shorter

    @property
    def firsts(self) -> np.ndarray:
        """(N,) the first row of each row's cluster; a first row, and a row without pairs, is its own."""
        return self._first
