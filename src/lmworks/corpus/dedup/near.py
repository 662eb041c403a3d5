"""Pairs of near-duplicates: candidates from bands, similarity estimated from sketches, and exact similarity for pairs in doubt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lmworks.corpus.dedup.sketch import Sketching, similarity

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
