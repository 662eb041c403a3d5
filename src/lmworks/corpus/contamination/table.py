"""Hashes of protected n-grams, looked up for whole batches of training text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmworks.corpus.units import STEP, mix, ngrams

SHORTEST, ALONE = 5, 8


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


@dataclass(frozen=True)
class Short:
    """A text to be found whole; where `beside` is not empty, only with this after it (or before it) not far off."""

    owner: int
    text: np.ndarray
    beside: np.ndarray
    before: bool = False


def short_of(owner: int, question: np.ndarray, answer: np.ndarray, scale: int, length: int) -> Short | None:
    """How an item with a question under the n-gram is looked for; None if that cannot be."""
    least = SHORTEST * scale
    if len(question) >= least:
        return Short(owner, question, answer if len(question) < ALONE * scale else answer[:0])
    if least <= len(answer) < length:
        return Short(owner, answer, question, before=True)
    both = np.concatenate((question, answer))
    return Short(owner, both, both[:0]) if least <= len(both) < length else None


class Tables:
    """All protected runs, made once: entries are numbered through all tables."""

    def __init__(
        self, runs: dict[int, list[tuple[np.ndarray, int]]], shorts: dict[tuple[int, int], dict[int, list[Short]]]
    ) -> None:
        self.runs: dict[int, tuple[Table, int]] = {}
        self.shorts: dict[tuple[int, int], tuple[Table, int]] = {}
        self.short_lengths: dict[int, list[int]] = {}
        self.entries = 0
        self._all: list[tuple[int, Table]] = []
        for length, texts in sorted(runs.items()):
            sizes = np.array([len(hashes) for hashes, _ in texts])
            grams = ngrams(np.concatenate([hashes for hashes, _ in texts]), length)
            text = np.repeat(np.arange(len(texts)), sizes)[: len(grams)]
            places = np.arange(len(grams)) - (np.cumsum(sizes) - sizes)[text]
            inside = places + length <= sizes[text]
            owners = np.array([owner for _, owner in texts])[text]
            self.runs[length] = self._numbered(Table(length, grams[inside], owners[inside], places[inside]))
        begun: dict[int, list[np.ndarray]] = {}
        for (scale, length), by_hash in sorted(shorts.items()):
            hashes = np.array(list(by_hash), dtype=np.uint64)
            owners = np.array([items[0].owner for items in by_hash.values()])
            self.shorts[scale, length] = self._numbered(Table(length, hashes, owners, np.zeros_like(owners)))
            self.short_lengths.setdefault(scale, []).append(length)
            begun.setdefault(scale, []).extend(ngrams(items[0].text, SHORTEST * scale)[:1] for items in by_hash.values())
        self.beginnings = {
            scale: Table(SHORTEST * scale, np.concatenate(parts), *[np.zeros(len(parts), dtype=np.int64)] * 2)
            for scale, parts in begun.items()
        }
        self.lengths = sorted({*self.runs, *(table.length for table in self.beginnings.values())})

    def _numbered(self, table: Table) -> tuple[Table, int]:
        first = self.entries
        self._all.append((first, table))
        self.entries += len(table)
        return table, first

    def where(self, entry: int) -> tuple[int, int, int]:
        """(protected text, first unit in it, length) of an entry."""
        first, table = next((first, table) for first, table in reversed(self._all) if first <= entry)
        return int(table.owners[entry - first]), int(table.places[entry - first]), table.length
