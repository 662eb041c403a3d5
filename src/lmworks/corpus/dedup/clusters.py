"""From pairs to clusters, in arrays: connected components, each represented by its first row."""

from __future__ import annotations

import numpy as np


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
