"""MinHash sketches with one byte per value, and the keys of their bands.

Each value of a sketch is equal in two documents with a probability of their Jaccard similarity J (Broder 1997). Sketches are computed by
fast similarity sketching (Dahlgaard, Knudsen and Thorup 2017, arXiv:1704.04370): each shingle is hashed into one bin instead of once per
value, and documents that are too short to fill all bins hash their shingles again. Only the lowest byte of a value is kept (Li and König
2010, b-bit minwise hashing); chance agreement of bytes, 1 in 256, is corrected for.
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
