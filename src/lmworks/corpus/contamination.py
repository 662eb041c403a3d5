"""Keeping held-out text and evaluation sets out of the training text, by shared n-grams (GPT-3, Brown et al. 2020, appendix C).

A training document that shares a run of 13 words with a held-out document or an evaluation text is dropped. Two exceptions keep the
gate honest:

- A run found in more than 10 training documents is boilerplate (a licence, a template's greeting), not a leak: it is reported and
  drops nothing.
  Nor does a run that reaches only a few words beyond boilerplate: at least half of its words must be its own. But an evaluation text
  of 13 words or more that stands *whole* in a document drops it all the same, however often it was copied.
- An evaluation text shorter than 13 words is looked for whole; one under 5 words would match by chance and is not looked for.

In scripts without spaces a character is less than a word: there all three lengths are doubled.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmworks.corpus.units import Units, ngrams, ngrams_of, units

BOILERPLATE_DOCUMENTS = 10
SHORTEST = 5


@dataclass(frozen=True)
class Match:
    """A passage of training document `document` (code points start to end) that protected text `against` has too."""

    document: int
    against: str
    start: int
    end: int


@dataclass(frozen=True)
class Boilerplate:
    """A run of protected text `against` found in `documents` training documents; `example` is one of the places."""

    documents: int
    example: Match


@dataclass(frozen=True)
class Findings:
    """What some training documents, numbered from 0, share with the protected texts: made apart, and added up with `Gate.add_up`.

    By the place of a table: how many documents have each entry as (entries, counts), and hits as rows of (document, entry, start, end).
    """

    documents: int
    seen: dict[int, tuple[np.ndarray, np.ndarray]]
    hits: dict[int, np.ndarray]
    whole: list[Match]


class _Table:
    """Protected n-grams of one length: sorted hashes, the text each came from, and in how many training documents each was seen."""

    def __init__(self, length: int, parts: list[tuple[np.ndarray, int]]) -> None:
        self.length = length
        grams = np.concatenate([grams for grams, _ in parts])
        owners = np.repeat(np.array([owner for _, owner in parts]), [len(grams) for grams, _ in parts])
        self.hashes, first = np.unique(grams, return_index=True)
        self.owners = owners[first]
        self.seen = np.zeros(len(first), dtype=np.int64)
        # most training n-grams are refused by this filter without a search
        self._shift = np.uint64(64 - min(max(len(first).bit_length() + 4, 16), 28))
        self._filter = np.zeros(1 << (64 - int(self._shift)), dtype=bool)
        self._filter[self.hashes >> self._shift] = True

    def again(self) -> _Table:
        """The same entries, seen nowhere."""
        other = copy.copy(self)
        other.seen = np.zeros_like(self.seen)
        return other

    def find(self, grams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(places in `grams` that are protected, which entry each is)."""
        places = np.flatnonzero(self._filter[grams >> self._shift])
        entries = np.minimum(np.searchsorted(self.hashes, grams[places]), len(self.hashes) - 1)
        hit = self.hashes[entries] == grams[places]
        return places[hit], entries[hit]


class Gate:
    """Protected text and what is found of it. Call `protect`, then `scan` all training documents in order, then `judge` the `suspects`."""

    def __init__(self, ngram: int) -> None:
        self.ngram = ngram
        self.names: list[str] = []
        self.trivial = 0
        self._scanned = 0
        self._parts: dict[int, list[tuple[np.ndarray, int]]] = {}
        self._long_items: dict[int, list[tuple[int, np.ndarray]]] = {}
        self._tables: list[_Table] | None = None
        self._hits: dict[int, list[np.ndarray]] = {}
        self._whole: list[Match] = []

    def protect(self, names: Sequence[str], texts: Sequence[str], *, evaluation: bool) -> None:
        """Add protected texts under their names. Only `evaluation` ones are looked for whole, as whole items are what a benchmark asks."""
        assert self._tables is None, "protect everything before the first scan"
        batch = units(texts)
        for document, name in enumerate(names):
            span = slice(batch.bounds[document], batch.bounds[document + 1])
            hashes = batch.hashes[span]
            scale = 2 if len(hashes) and batch.single[span].mean() > 0.5 else 1
            length = self.ngram * scale
            if len(hashes) < length:
                if not evaluation or len(hashes) < SHORTEST * scale:
                    self.trivial += 1
                    continue
                length = len(hashes)
            grams = ngrams(hashes, length)
            self._parts.setdefault(length, []).append((grams, len(self.names)))
            if evaluation and len(grams) > 1:
                self._long_items.setdefault(int(grams[0]), []).append((len(self.names), hashes))
            self.names.append(name)

    def _made(self) -> list[_Table]:
        if self._tables is None:
            self._tables = [_Table(length, parts) for length, parts in sorted(self._parts.items())]
        return self._tables

    def again(self) -> Gate:
        """The same protected texts, with nothing scanned."""
        other = copy.copy(self)
        other._tables = [table.again() for table in self._made()]
        other._hits, other._whole, other._scanned = {}, [], 0
        return other

    def findings(self) -> Findings:
        """What has been found so far."""
        seen = {number: (entries := np.flatnonzero(table.seen), table.seen[entries]) for number, table in enumerate(self._made())}
        return Findings(self._scanned, seen, {number: np.concatenate(rows) for number, rows in self._hits.items()}, list(self._whole))

    def add_up(self, found: Findings) -> None:
        """Take in what was found in the next documents elsewhere, as if they had been scanned here."""
        tables = self._made()
        for number, rows in sorted(found.hits.items()):
            rows = rows[tables[number].seen[rows[:, 1]] <= BOILERPLATE_DOCUMENTS]
            self._hits.setdefault(number, []).append(rows + np.array([self._scanned, 0, 0, 0]))
        for number, (entries, counts) in found.seen.items():
            tables[number].seen[entries] += counts
        self._whole += [Match(one.document + self._scanned, one.against, one.start, one.end) for one in found.whole]
        self._scanned += found.documents

    def common(self) -> dict[int, np.ndarray]:
        """By the place of a table: the entries that are boilerplate."""
        return {number: np.flatnonzero(table.seen > BOILERPLATE_DOCUMENTS) for number, table in enumerate(self._made())}

    def know_common(self, common: dict[int, np.ndarray]) -> None:
        """Take these entries for boilerplate."""
        for number, entries in common.items():
            self._made()[number].seen[entries] = BOILERPLATE_DOCUMENTS + 1

    def scan(self, batch: Units) -> None:
        """Look at the next training documents, numbered on from those before."""
        tables = self._made()
        grams_by_length = ngrams_of(batch.hashes, [table.length for table in tables])
        for number, (table, (length, grams)) in enumerate(zip(tables, grams_by_length, strict=True)):
            places, entries = table.find(grams)
            documents = np.searchsorted(batch.bounds, places, side="right") - 1
            inside = places + length <= batch.bounds[documents + 1]
            places, entries, documents = places[inside], entries[inside], documents[inside]
            if not len(places):
                continue
            self._find_whole(batch, grams, places, documents)
            open_ = table.seen[entries] <= BOILERPLATE_DOCUMENTS  # one beyond, to have an example of what is boilerplate
            rows = np.stack((documents + self._scanned, entries, batch.starts[places], batch.ends[places + length - 1]), axis=1)
            self._hits.setdefault(number, []).append(rows[open_])
            once = np.unique(entries.astype(np.int64) * batch.documents + documents) // batch.documents
            np.add.at(table.seen, once, 1)
        self._scanned += batch.documents

    def _find_whole(self, batch: Units, grams: np.ndarray, places: np.ndarray, documents: np.ndarray) -> None:
        if not self._long_items:
            return
        for place, document in zip(places.tolist(), documents.tolist(), strict=True):
            for owner, item in self._long_items.get(int(grams[place]), ()):
                end = place + len(item)
                if end <= batch.bounds[document + 1] and np.array_equal(batch.hashes[place:end], item):
                    self._whole.append(
                        Match(document + self._scanned, self.names[owner], int(batch.starts[place]), int(batch.ends[end - 1]))
                    )

    def suspects(self) -> list[int]:
        """Numbers of the training documents that share a run with protected text which is no boilerplate: to be judged."""
        found = {match.document for match in self._whole}
        for table, hits in self._all_hits():
            found.update(hits[table.seen[hits[:, 1]] <= BOILERPLATE_DOCUMENTS, 0].tolist())
        return sorted(found)

    def judge(self, document: int, batch: Units) -> Match | None:
        """The longest passage for which training document `document`, whose units `batch` holds alone, must go; None if it may stay."""
        found = [match for match in self._whole if match.document == document]
        for table, (length, grams) in zip(
            self._tables or [], ngrams_of(batch.hashes, [table.length for table in self._tables or []]), strict=True
        ):
            places, entries = table.find(grams)
            rare = table.seen[entries] <= BOILERPLATE_DOCUMENTS
            own = _covered(places[rare], length, len(batch.hashes)) & ~_covered(places[~rare], length, len(batch.hashes))
            for first, last in _runs(_covered(places, length, len(batch.hashes))):
                if own[first:last].sum() >= (length + 1) // 2:
                    inside = rare & (places >= first) & (places < last)
                    owner = self.names[table.owners[entries[inside][0]]]
                    found.append(Match(document, owner, int(batch.starts[first]), int(batch.ends[last - 1])))
        return max(found, key=lambda match: match.end - match.start, default=None)

    def boilerplate(self, most: int) -> list[Boilerplate]:
        """The runs let pass because they are in too many training documents, most frequent first."""
        found = []
        for table, hits in self._all_hits():
            common = hits[table.seen[hits[:, 1]] > BOILERPLATE_DOCUMENTS]
            _, first = np.unique(common[:, 1], return_index=True)
            found += [
                Boilerplate(int(table.seen[entry]), Match(document, self.names[owner], start, end))
                for document, entry, start, end, owner in common[first].tolist()
            ]
        found.sort(key=lambda run: (-run.documents, run.example.document, run.example.start))
        return _apart(found, most)

    def _all_hits(self) -> list[tuple[_Table, np.ndarray]]:
        tables = self._tables or []
        hits = [(tables[number], np.concatenate(parts)) for number, parts in sorted(self._hits.items())]
        return [(table, np.column_stack((rows, table.owners[rows[:, 1]]))) for table, rows in hits]


def _covered(places: np.ndarray, length: int, count: int) -> np.ndarray:
    """(count,) bool: the units that lie in a run of `length` beginning at one of `places`."""
    edges = np.zeros(count + 1, dtype=np.int64)
    np.add.at(edges, places, 1)
    np.add.at(edges, places + length, -1)
    return np.cumsum(edges)[:-1] > 0


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """(first, one past the last) of each stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _apart(runs: list[Boilerplate], most: int) -> list[Boilerplate]:
    """The first `most` of the runs whose examples do not overlap: one sentence is told once, not once per word."""
    told: list[Boilerplate] = []
    for run in runs:
        if len(told) == most:
            break
        if all(
            run.example.document != other.example.document
            or run.example.start >= other.example.end
            or run.example.end <= other.example.start
            for other in told
        ):
            told.append(run)
    return told
