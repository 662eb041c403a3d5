"""Near-duplicates: MinHash signatures (Broder 1997) and locality-sensitive hashing in bands (Leskovec et al., Mining of Massive
Datasets, 3.4).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmworks.corpus.units import Units, ngrams, whole

_BLOCK = 2048  # shingles times 112 permutations times 4 bytes stay in the second-level cache
_NEIGHBOURS = 32


def permutations(count: int, seed: int = 0x6D696E68) -> tuple[np.ndarray, np.ndarray]:
    """Odd multipliers and offsets of `count` bijections of 32-bit values, fixed for ever so that signatures can be compared across runs."""
    random = np.random.Generator(np.random.PCG64(seed))
    return random.integers(0, 2**31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1), random.integers(
        0, 2**32, count, dtype=np.uint32
    )


def signatures(batch: Units, ngram: int, count: int, documents: Sequence[int] | None = None) -> np.ndarray:
    """(D, count) uint32: per document (all, or those named) and permutation the least value over its n-grams.

    A document shorter than n is one shingle; one without units keeps the greatest value everywhere.
    """
    grams = (ngrams(batch.hashes, ngram) >> np.uint64(32)).astype(np.uint32)
    multipliers, offsets = permutations(count)
    chosen = range(batch.documents) if documents is None else documents
    result = np.full((len(chosen), count), 0xFFFFFFFF, dtype=np.uint32)
    for index, document in enumerate(chosen):
        start, stop = int(batch.bounds[document]), int(batch.bounds[document + 1])
        if stop - start >= ngram:
            shingles = grams[start : stop - ngram + 1]
        else:
            shingles = (whole(batch.hashes[start:stop]) >> np.uint64(32)).astype(np.uint32) if stop > start else grams[:0]
        row = result[index]
        for first in range(0, len(shingles), _BLOCK):
            values = shingles[first : first + _BLOCK, None] * multipliers
            values += offsets
            np.minimum(row, values.min(axis=0), out=row)
    return result


def similarity(signatures_NP: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Estimated Jaccard similarity of the pairs (left, right): the share of equal signature values."""
    share = np.empty(len(left))
    for first in range(0, len(left), 1 << 14):
        span = slice(first, first + (1 << 14))
        share[span] = (signatures_NP[left[span]] == signatures_NP[right[span]]).mean(axis=1)
    return share


def candidates(signatures_NP: np.ndarray, bands: int) -> np.ndarray:
    """(pairs, 2) of rows that agree on all values of at least one band, lower row first, each pair once.

    In a bucket of more than 32 rows each is paired with the first and its 32 next, which joins the bucket's true duplicates all the same
    without the square of its size.
    """
    count, width = signatures_NP.shape
    rows = width // bands
    found = []
    for band in range(bands):
        part = np.ascontiguousarray(signatures_NP[:, band * rows : (band + 1) * rows]).view(np.dtype((np.void, rows * 4))).ravel()
        order = np.argsort(part, kind="stable")
        same = part[order[1:]] == part[order[:-1]]
        bucket = np.concatenate(([0], np.cumsum(~same)))
        for step in range(1, _NEIGHBOURS + 1):
            equal = bucket[step:] == bucket[:-step]
            if not equal.any():
                break
            found.append(np.stack((order[:-step][equal], order[step:][equal]), axis=1))
        else:
            heads = np.searchsorted(bucket, bucket, side="left")
            found.append(np.stack((order[heads], order), axis=1)[heads != np.arange(count)])
    if not found:
        return np.zeros((0, 2), dtype=np.int64)
    return np.unique(np.sort(np.concatenate(found), axis=1), axis=0)


def duplicates(signatures_NP: np.ndarray, bands: int, threshold: float) -> np.ndarray:
    """(N,) int64: for each row the first row of its cluster of near-duplicates (itself if it has none or is the first).

    Candidate pairs whose estimated similarity reaches `threshold` are joined; clusters are their transitive closure.
    """
    parent = np.arange(len(signatures_NP))
    pairs = candidates(signatures_NP, bands) if len(parent) > 1 else np.zeros((0, 2), dtype=np.int64)
    near = pairs[similarity(signatures_NP, pairs[:, 0], pairs[:, 1]) >= threshold]

    def root(x: int) -> int:
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = int(parent[x])
        return x

    for left, right in near.tolist():
        a, b = root(left), root(right)
        parent[max(a, b)] = min(a, b)
    return np.array([root(x) for x in range(len(parent))], dtype=np.int64)
