"""Hash tables of protected n-grams, looked up for whole batches of training text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmworks.corpus.units import STEP, mix, ngrams, run_hash

SHORTEST, ALONE, ANSWER_ALONE = 5, 8, 10
MOST_ITEMS = 10  # a run that more items of one set share, or half of its items, is wording of the set
_LEAST_ITEMS = 3
NEAR, NEAR_SHARE, NEAR_LEAST = 5, 0.4, 6


class NgramTable:
    """Protected runs of `length` units: sorted hashes, and for each the protected text and the unit in it where it first occurs."""

    def __init__(self, length: int, hashes: np.ndarray, owners: np.ndarray, places: np.ndarray) -> None:
        self.length = length
        self.hashes, first = np.unique(hashes, return_index=True)
        self.owners, self.places = owners[first], places[first]
        # two bit filters, on the first and the last bits of a hash, reject nearly all training n-grams without a binary search
        small, large = (min(max(len(first).bit_length() + more, 14), 28) for more in (2, 4))  # the first filter should fit into a cache
        self._shift, self._mask = np.uint64(64 - small), np.uint64((1 << large) - 1)
        self._high, self._low = np.zeros(1 << small, dtype=bool), np.zeros(1 << large, dtype=bool)
        self._high[self.hashes >> self._shift] = True
        self._low[self.hashes & self._mask] = True

    def __len__(self) -> int:
        return len(self.hashes)

    def find(self, grams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(indices of `grams` that are protected, the entry of each)."""
        places = np.flatnonzero(self._high[grams >> self._shift])
        places = places[self._low[grams[places] & self._mask]]
        entries = np.minimum(np.searchsorted(self.hashes, grams[places]), len(self.hashes) - 1)
        hit = self.hashes[entries] == grams[places]
        return places[hit], entries[hit]


def extend_ngrams(hashes: np.ndarray, places: np.ndarray, shortest: int, lengths: list[int]) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """For each of `lengths`, ascending: (length, places at which so many units follow, hashes of these runs, equal to those of `ngrams`).

    Only the given places are extended, at which a run of `shortest` units has matched; they are few, so many lengths cost little.
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
class ShortText:
    """A text that must match whole. If `context` is not empty, it must follow (or precede, if `before`) the text within a limited
    distance.
    """

    owner: int
    text: np.ndarray
    context: np.ndarray
    before: bool = False


def short_texts_of(item: Item, length: int) -> list[ShortText]:
    """The texts by which an item with a short question or a short answer is searched for; empty if it is too short for any search."""
    owner, question, answer, scale = item.owner, item.question, item.answer, item.scale
    least, alone = SHORTEST * scale, ALONE * scale
    found = []
    if least <= len(question) < length:
        found.append(ShortText(owner, question, item.context if len(question) < alone else answer[:0]))
    elif 0 < len(question) < least and least <= len(answer) < min(alone, length):
        found.append(ShortText(owner, answer, question, before=True))
    elif len(question) < least and len(answer) < least:
        both = np.concatenate((question, answer))
        found += [ShortText(owner, both, both[:0])] if least <= len(both) < length else []
    if ANSWER_ALONE * scale <= len(answer) < length:
        found.append(ShortText(owner, answer, answer[:0]))
    return found


@dataclass(frozen=True)
class Item:
    """A protected text: question and answer as units. `set` is the number of the evaluation set; -1 for held-out text. `context` is the
    answer that must follow a short question; it may be searched for in another way, and is then no part of the item.
    """

    owner: int
    set: int
    question: np.ndarray
    answer: np.ndarray
    scale: int
    context: np.ndarray

    @property
    def whole(self) -> np.ndarray:
        return np.concatenate((self.question, self.answer))


@dataclass(frozen=True)
class LongQuestion:
    """A question that must match whole. It is found by the run that begins at its unit `at`."""

    owner: int
    at: int
    text: np.ndarray


class ProtectedNgrams:
    """All protected runs; entries are numbered over all tables. `sizes` are the numbers of items of the evaluation sets.

    Runs that more than ten items of a set share, or half of them and at least three, are wording of the set. They are left out and counted
    in `shared`, by set, with the text and place of one of them.
    """

    def __init__(self, items: Sequence[Item], ngram: int, sizes: Sequence[int], triggers: np.ndarray) -> None:
        self.runs: dict[int, tuple[NgramTable, int]] = {}
        self.shorts: dict[tuple[int, int], tuple[NgramTable, int]] = {}
        self.short_lengths: dict[int, list[int]] = {}
        self.short_items: dict[tuple[int, int], dict[int, list[ShortText]]] = {}
        self.long: dict[int, list[LongQuestion]] = {}
        self.near: dict[int, NearlyWhole] = {}
        self.shared: dict[int, tuple[int, int, int, int]] = {}
        self.owners: set[int] = set()
        self.entries = 0
        self._all: list[tuple[int, NgramTable]] = []
        for scale in sorted({item.scale for item in items}):
            self._add_runs([item for item in items if item.scale == scale], scale, ngram * scale, sizes)
        self._add_shorts(items, ngram)
        scales = {*self.short_prefixes, *self.near, *([1] if len(triggers) else [])}
        none = triggers[:0]
        self.fives = [FiveGrams(scale, self.short_prefixes.get(scale, none), self.near.get(scale), triggers if scale == 1 else none)
                      for scale in sorted(scales)]  # fmt: skip
        self.lengths = sorted({*self.runs, *(five.table.length for five in self.fives)})

    def _add_runs(self, items: list[Item], scale: int, length: int, sizes: Sequence[int]) -> None:
        items = sorted((item for item in items if len(item.question) + len(item.answer) >= length), key=lambda item: item.set < 0)
        if not items:
            return
        texts = [item.whole for item in items]
        grams, of_item, places = _grams(texts, length)
        sets = np.array([item.set for item in items])
        common = _is_shared(grams, of_item, sets, sizes)
        owners = np.array([item.owner for item in items])
        for number in np.unique(sets[of_item[common]]).tolist():
            of_set = np.flatnonzero(common & (sets[of_item] == number))
            first = int(of_set[0])
            self.shared[number] = len(np.unique(grams[of_set])), int(owners[of_item[first]]), int(places[first]), length
        own = ~common
        self.runs[length] = self._numbered(NgramTable(length, grams[own], owners[of_item[own]], places[own]))
        self.owners.update(np.unique(owners[of_item[own]]).tolist())
        firsts: dict[int, int] = {}
        for place in np.flatnonzero(own)[::-1].tolist():
            firsts[int(of_item[place])] = place
        for number, place in firsts.items():
            item, at = items[number], int(places[place])
            text = item.question if len(item.question) >= at + length else item.whole
            if item.set >= 0:
                self.long.setdefault(int(grams[place]), []).append(LongQuestion(item.owner, at, text))
        asked = [item for item in items if item.set >= 0]
        if asked:
            self.near[scale] = near = NearlyWhole(asked, scale, sizes)
            self.owners |= near.owners

    def _add_shorts(self, items: Sequence[Item], ngram: int) -> None:
        prefixes: dict[int, list[np.ndarray]] = {}
        for item in items:
            for short in short_texts_of(item, ngram * item.scale) if item.set >= 0 else ():
                by_hash = self.short_items.setdefault((item.scale, len(short.text)), {})
                by_hash.setdefault(int(run_hash(short.text)[0]), []).append(short)
        for (scale, length), by_hash in sorted(self.short_items.items()):
            hashes = np.array(list(by_hash), dtype=np.uint64)
            owners = np.array([shorts[0].owner for shorts in by_hash.values()])
            self.shorts[scale, length] = self._numbered(NgramTable(length, hashes, owners, np.zeros_like(owners)))
            self.short_lengths.setdefault(scale, []).append(length)
            prefixes.setdefault(scale, []).extend(ngrams(shorts[0].text, SHORTEST * scale)[:1] for shorts in by_hash.values())
            self.owners.update(short.owner for shorts in by_hash.values() for short in shorts)
        self.short_prefixes = {scale: np.concatenate(parts) for scale, parts in prefixes.items()}

    def _numbered(self, table: NgramTable) -> tuple[NgramTable, int]:
        first = self.entries
        self._all.append((first, table))
        self.entries += len(table)
        return table, first

    def where(self, entry: int) -> tuple[int, int, int]:
        """(protected text, first unit in it, length) of an entry."""
        first, table = next((first, table) for first, table in reversed(self._all) if first <= entry)
        return int(table.owners[entry - first]), int(table.places[entry - first]), table.length

    @property
    def owner_of(self) -> np.ndarray:
        """(entries,) the protected text of each entry."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(table.owners for _, table in self._all)])


class NearlyWhole:
    """Search for items that a document contains nearly whole, with some words changed: enough of their runs of five in a stretch of limited
    length.
    """

    def __init__(self, items: Sequence[Item], scale: int, sizes: Sequence[int]) -> None:
        texts = [item.question if len(item.question) >= 2 * NEAR * scale else item.whole for item in items]
        grams, of_item, _ = _grams(texts, NEAR * scale)
        own = ~_is_shared(grams, of_item, np.array([item.set for item in items]), sizes)
        grams, of_item = grams[own], of_item[own]
        order = np.lexsort((of_item, grams))
        once = np.ones(len(order), dtype=bool)
        once[1:] = (grams[order][1:] != grams[order][:-1]) | (of_item[order][1:] != of_item[order][:-1])
        grams, self._items = grams[order[once]], of_item[order[once]]
        self.length, self.hashes = NEAR * scale, np.unique(grams)
        self._bounds = np.append(np.searchsorted(grams, self.hashes), len(grams))
        counts = np.bincount(self._items, minlength=len(items))
        self._needed = np.maximum(np.ceil(NEAR_SHARE * counts).astype(np.int64), NEAR_LEAST)
        self._stretch = np.array([len(text) + len(text) // 3 + 8 for text in texts])
        self._owners = np.array([item.owner for item in items])
        self.owners: set[int] = set(self._owners[counts >= self._needed].tolist())

    def find(self, places: np.ndarray, entries: np.ndarray, documents: np.ndarray) -> list[tuple[int, int, int, int]]:
        """(document, protected text, first unit, one past the last) of the items found, from the places, ascending, where their runs
        occur.
        """
        counts = self._bounds[entries + 1] - self._bounds[entries]
        hit = np.repeat(np.arange(len(entries)), counts)
        item = self._items[np.arange(len(hit)) - np.repeat(np.cumsum(counts) - counts, counts) + self._bounds[entries][hit]]
        order = np.lexsort((places[hit], item, documents[hit]))
        hit, item = hit[order], item[order]
        edges = np.flatnonzero(np.concatenate(([True], (item[1:] != item[:-1]) | (documents[hit][1:] != documents[hit][:-1]), [True])))
        found = []
        for group in np.flatnonzero(np.diff(edges) >= self._needed[item[edges[:-1]]] if len(item) else np.zeros(0, dtype=bool)).tolist():
            inside = hit[edges[group] : edges[group + 1]]
            number = int(item[edges[group]])
            span = self._stretch_of(places[inside], entries[inside], number)
            if span:
                found.append((int(documents[inside[0]]), int(self._owners[number]), *span))
        return found

    def _stretch_of(self, places: np.ndarray, entries: np.ndarray, item: int) -> tuple[int, int] | None:
        needed, first = int(self._needed[item]), 0
        for last in range(needed - 1, len(places)):
            while places[last] - places[first] + self.length > self._stretch[item]:
                first += 1
            if last - first + 1 >= needed and len(np.unique(entries[first : last + 1])) >= needed:
                end = np.searchsorted(places, places[first] + self._stretch[item] - self.length, side="right") - 1
                return int(places[first]), int(places[end]) + self.length
        return None


class FiveGrams:
    """All runs of five units that can lead to a match, in one table, which is cheaper than three.

    Such a run begins a short text, is part of an item that may occur nearly whole, or triggers a comparison with symbols (`triggers`).
    """

    def __init__(self, scale: int, prefixes: np.ndarray, near: NearlyWhole | None, triggers: np.ndarray) -> None:
        alike = near.hashes if near else triggers[:0]
        both = np.concatenate((prefixes, alike, triggers))
        zeros = np.zeros(len(both), dtype=np.int64)
        self.scale, self.near = scale, near
        self.table = NgramTable(NEAR * scale, both, zeros, zeros)
        self.begins, self.triggers = np.isin(self.table.hashes, prefixes), np.isin(self.table.hashes, triggers)
        self.alike = np.where(np.isin(self.table.hashes, alike), np.searchsorted(alike, self.table.hashes), -1)


def _grams(texts: Sequence[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All runs of `length` units of the texts: (their hashes, the text of each, its unit in the text)."""
    sizes = np.array([len(hashes) for hashes in texts])
    grams = ngrams(np.concatenate(texts), length)
    text = np.repeat(np.arange(len(texts)), sizes)[: len(grams)]
    places = np.arange(len(grams)) - (np.cumsum(sizes) - sizes)[text]
    inside = places + length <= sizes[text]
    return grams[inside], text[inside], places[inside]


def _is_shared(grams: np.ndarray, of_item: np.ndarray, sets: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """(G,) bool: the runs that many items of one evaluation set share."""
    found = np.zeros(len(grams), dtype=bool)
    asked = np.flatnonzero(sets[of_item] >= 0)
    _, which, counts = np.unique(grams[asked], return_inverse=True, return_counts=True)
    asked = asked[counts[which] >= _LEAST_ITEMS]
    if not len(asked):
        return found
    asked = asked[np.lexsort((of_item[asked], sets[of_item[asked]], grams[asked]))]
    gram, item = grams[asked], of_item[asked]
    first = np.ones(len(asked), dtype=bool)
    first[1:] = (gram[1:] != gram[:-1]) | (sets[item[1:]] != sets[item[:-1]])
    other = first.copy()
    other[1:] |= item[1:] != item[:-1]
    heads = np.flatnonzero(first)
    having = np.add.reduceat(other, heads, dtype=np.int64)
    how = (having > MOST_ITEMS) | (having >= _LEAST_ITEMS) & (2 * having >= np.array(sizes)[sets[item[heads]]])
    found[asked[np.repeat(how, np.diff(np.append(heads, len(asked))))]] = True
    return found
