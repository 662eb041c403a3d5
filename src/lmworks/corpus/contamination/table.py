"""Hashes of protected n-grams, looked up for whole batches of training text."""

from __future__ import annotations

import numpy as np

from lmworks.corpus.units import STEP, mix


class Table:
    """Protected runs of `length` units: sorted hashes, and of each the protected text and the unit in it where it first stands."""

    def __init__(self, length: int, hashes: np.ndarray, owners: np.ndarray, places: np.ndarray) -> None:
        self.length = length
        self.hashes, first = np.unique(hashes, return_index=True)
        self.owners, self.places = owners[first], places[first]
        # most training n-grams are refused by this filter without a search
        self._shift = np.uint64(64 - min(max(len(first).bit_length() + 4, 16), 28))
        self._filter = np.zeros(1 << (64 - int(self._shift)), dtype=bool)
        self._filter[self.hashes >> self._shift] = True

    def __len__(self) -> int:
        return len(self.hashes)

    def find(self, grams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(places in `grams` that are protected, which entry each is)."""
        places = np.flatnonzero(self._filter[grams >> self._shift])
        entries = np.minimum(np.searchsorted(self.hashes, grams[places]), len(self.hashes) - 1)
        hit = self.hashes[entries] == grams[places]
        return places[hit], entries[hit]


def longer(hashes: np.ndarray, places: np.ndarray, shortest: int, lengths: list[int]) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """For each of `lengths`, ascending: (length, places at which so many units follow, hashes of these runs), as `ngrams` has them.

    Only at the given places, where a run of `shortest` has been found: few of them, so that many lengths cost little.
    """
    found = []
    grams = np.zeros(len(places), dtype=np.uint64)
    for n in range(1, max(lengths, default=0) + 1):
        keep = places + n <= len(hashes)
        places, grams = places[keep], grams[keep]
        grams *= STEP
        grams += hashes[places + n - 1]
        if n >= shortest and n in lengths:
            found.append((n, places, mix(grams.copy())))
    return found
