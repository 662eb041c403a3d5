"""From pairs to clusters, in arrays: connected components, each named by its first row."""

from __future__ import annotations

import numpy as np


class Clusters:
    """Rows that are joined by pairs, at any time, in any order: the clusters depend on the set of pairs alone."""

    def __init__(self, count: int) -> None:
        self._first = np.arange(count, dtype=np.int64)

    def join(self, pairs_P2: np.ndarray) -> None:
        """Put the two rows of each pair into one cluster.

        Roots are hooked onto the least root they meet, then every path is made short, until all pairs agree (Shiloach and Vishkin 1982):
        a logarithm of rounds.
        """
        while len(pairs_P2):
            roots = self._first[pairs_P2]
            apart = roots[:, 0] != roots[:, 1]
            if not apart.any():
                return
            pairs_P2, roots = pairs_P2[apart], roots[apart]
            np.minimum.at(self._first, roots.max(axis=1), roots.min(axis=1))
            self._shorten()

    def apart(self, pairs_P2: np.ndarray) -> np.ndarray:
        """The pairs whose rows are not in one cluster yet."""
        roots = self._first[pairs_P2]
        return pairs_P2[roots[:, 0] != roots[:, 1]]

    def _shorten(self) -> None:
        while True:
            shorter = self._first[self._first]
            if np.array_equal(shorter, self._first):
                return
            self._first = shorter

    @property
    def firsts(self) -> np.ndarray:
        """(N,) the first row of each row's cluster: itself for the first and for a row that is alone."""
        return self._first
