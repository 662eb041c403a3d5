"""The gate: what is protected, what training text has of it, and which documents must go. See the package for the rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmworks.corpus.contamination.table import SHORTEST, Short, Tables, longer, short_of
from lmworks.corpus.units import Units, ngrams_of, units, whole
from lmworks.files import atomic_path

BOILERPLATE_DOCUMENTS = 10
ANSWER_WITHIN = 48


HELD_OUT = "held out"


@dataclass(frozen=True)
class Question:
    """An item of an evaluation set: `name` is SET/ITEM, `answer` the right one as it is written, if there is one to write."""

    name: str
    text: str
    answer: str = ""


@dataclass(frozen=True)
class Match:
    """A passage of a training document (code points start to end) that protected text `against` has too.

    `evaluation` says that it is an item of an evaluation set, not a held-out document.
    """

    against: str
    evaluation: bool
    start: int
    end: int

    @property
    def set(self) -> str:
        """The evaluation set, or `held out`."""
        return set_of(self.against) if self.evaluation else HELD_OUT


def set_of(name: str) -> str:
    """The set of an item called SET/ITEM."""
    return name.split("/", 1)[0]


@dataclass(frozen=True)
class Boilerplate:
    """A passage of protected text `against` that stands in `documents` training documents, and was let pass."""

    documents: int
    against: str
    passage: str


@dataclass(frozen=True)
class Findings:
    """What one part's documents have in common with protected text: (F, 2) int64 rows of (document, entry), each pair once, ascending.

    An entry under `Gate.entries` is a run; from there on they are whole items.
    """

    rows: np.ndarray

    @classmethod
    def joined(cls, batches: Sequence[tuple[int, Findings]]) -> Findings:
        """Those of several batches, each with the number of its first document."""
        shifted = [found.rows + np.array([first, 0]) for first, found in batches]
        return cls(np.concatenate([np.zeros((0, 2), dtype=np.int64), *shifted]))

    def save(self, path: Path) -> None:
        """Write them, whole or not at all."""
        with atomic_path(path) as aside, open(aside, "wb") as handle:
            np.save(handle, self.rows, allow_pickle=False)

    @classmethod
    def load(cls, path: Path) -> Findings:
        return cls(np.load(path, allow_pickle=False))


@dataclass(frozen=True)
class _Hits:
    """Protected runs of one length in a batch: the unit where each begins, its entry and document; `grams` but for short questions."""

    length: int
    places: np.ndarray
    entries: np.ndarray
    documents: np.ndarray
    grams: np.ndarray | None = None


class Gate:
    """Protected texts. Call `protect` for all of them, then `scan`, `seen`, `suspects` and `judge`."""

    def __init__(self, ngram: int) -> None:
        self.ngram = ngram
        self.names: list[str] = []
        self.evaluation: list[bool] = []
        self.texts: list[str] = []
        self.trivial: dict[str, int] = {}
        self._runs: dict[int, list[tuple[np.ndarray, int]]] = {}
        self._shorts: dict[tuple[int, int], dict[int, list[Short]]] = {}
        self._long: dict[int, list[tuple[int, np.ndarray]]] = {}
        self._made: Tables | None = None

    def protect(self, names: Sequence[str], texts: Sequence[str], answers: Sequence[str] | None = None, *, evaluation: bool) -> None:
        """Add protected texts under their names (SET/ITEM, or the id of a held-out document).

        Only `evaluation` ones are looked for whole, as whole questions are what a test asks; `answers` are their right answers. Items too
        short to be looked for at all are counted in `trivial`, by set.

        A held-out document shorter than the n-gram is passed over.
        """
        assert self._made is None, "protect everything before the first scan"
        asked, replied = units(texts), units(answers if answers is not None else [""] * len(texts))
        for number, (name, text) in enumerate(zip(names, texts, strict=True)):
            question, answer = asked.hashes_of(number), replied.hashes_of(number)
            span = slice(asked.bounds[number], asked.bounds[number + 1])
            scale = 2 if len(question) and asked.single[span].mean() > 0.5 else 1
            if self._add(len(self.names), question, answer, scale, evaluation):
                self.names.append(name)
                self.evaluation.append(evaluation)
                self.texts.append(text)
            elif evaluation:
                self.trivial[set_of(name)] = self.trivial.get(set_of(name), 0) + 1

    def _add(self, owner: int, question: np.ndarray, answer: np.ndarray, scale: int, evaluation: bool) -> bool:
        length = self.ngram * scale
        both = np.concatenate((question, answer))
        if len(both) >= length:
            self._runs.setdefault(length, []).append((both, owner))
            if evaluation:
                item = question if len(question) >= length else both
                self._long.setdefault(int(whole(item[:length])[0]), []).append((owner, item))
        if not evaluation or len(question) >= length:
            return len(both) >= length
        short = short_of(owner, question, answer, scale, length)
        if short is None:
            return len(both) >= length
        by_hash = self._shorts.setdefault((scale, len(short.text)), {})
        by_hash.setdefault(int(whole(short.text)[0]), []).append(short)
        return True

    @property
    def protected(self) -> dict[str, int]:
        """How many items of each evaluation set, and how many held-out documents, are looked for."""
        sets = (set_of(name) if evaluation else HELD_OUT for name, evaluation in zip(self.names, self.evaluation, strict=True))
        return dict(sorted(Counter(sets).items()))

    @property
    def _tables(self) -> Tables:
        if self._made is None:
            self._made = Tables(self._runs, self._shorts)
        return self._made

    @property
    def entries(self) -> int:
        """How many runs are protected."""
        return self._tables.entries

    def scan(self, batch: Units) -> Findings:
        """What the documents of a batch have of the protected texts."""
        found = [np.zeros((0, 2), dtype=np.int64)]
        for hits in self._hits(batch):
            found.append(np.stack((hits.documents, hits.entries), axis=1))
            wholes = [(document, self.entries + owner) for document, owner, _, _ in self._whole(batch, hits)]
            found.append(np.array(wholes, dtype=np.int64).reshape(-1, 2))
        return Findings(np.unique(np.concatenate(found), axis=0))

    def _hits(self, batch: Units) -> Iterator[_Hits]:
        tables = self._tables
        for length, grams in ngrams_of(batch.hashes, tables.lengths):
            if length in tables.runs:
                table, first = tables.runs[length]
                places, entries = table.find(grams)
                inside, documents = _inside(batch, places, length)
                places = places[inside]
                yield _Hits(length, places, entries[inside] + first, documents, grams[places])
            for scale, table in tables.beginnings.items():
                if length == table.length:
                    yield from self._short_hits(batch, table.find(grams)[0], scale)

    def _short_hits(self, batch: Units, begun: np.ndarray, scale: int) -> Iterator[_Hits]:
        tables = self._tables
        for length, places, grams in longer(batch.hashes, begun, SHORTEST * scale, tables.short_lengths[scale]):
            table, first = tables.shorts[scale, length]
            index, entries = table.find(grams)
            inside, documents = _inside(batch, places[index], length)
            places, entries = places[index][inside], entries[inside]
            keep = np.array(
                [
                    self._answered(batch, place, document, scale, int(table.hashes[entry]), length)
                    for place, document, entry in zip(places.tolist(), documents.tolist(), entries.tolist(), strict=True)
                ],
                dtype=bool,
            )
            yield _Hits(length, places[keep], entries[keep] + first, documents[keep])

    def _answered(self, batch: Units, place: int, document: int, scale: int, hashed: int, length: int) -> bool:
        """Whether what the short text at `place` needs beside it, if anything, stands there."""
        for short in self._shorts[scale, length][hashed]:
            wanted = len(short.beside)
            if not wanted:
                return True
            reach = ANSWER_WITHIN * scale + wanted
            after = place + length, min(place + length + reach, int(batch.bounds[document + 1]))
            before = max(place - reach, int(batch.bounds[document])), place
            window = batch.hashes[slice(*(before if short.before else after))]
            begun = np.flatnonzero(window[: max(len(window) - wanted + 1, 0)] == short.beside[0])
            if any(np.array_equal(window[at : at + wanted], short.beside) for at in begun.tolist()):
                return True
        return False

    def _whole(self, batch: Units, hits: _Hits) -> Iterator[tuple[int, int, int, int]]:
        """(document, owner, first unit, one past the last) of long evaluation questions that stand whole in a document."""
        if hits.grams is None or not self._long:
            return
        for place, document, gram in zip(hits.places.tolist(), hits.documents.tolist(), hits.grams.tolist(), strict=True):
            for owner, item in self._long.get(gram, ()):
                end = place + len(item)
                if end <= batch.bounds[document + 1] and np.array_equal(batch.hashes[place:end], item):
                    yield document, owner, place, end

    def seen(self, parts: Iterable[Findings]) -> np.ndarray:
        """(entries,) in how many training documents of all parts each protected run stands."""
        count = np.zeros(self.entries, dtype=np.int64)
        for found in parts:
            entries = found.rows[:, 1]
            count += np.bincount(entries[entries < self.entries], minlength=self.entries)
        return count

    def suspects(self, found: Findings, seen: np.ndarray) -> list[int]:
        """The documents of a part that have a run which is no boilerplate, or a whole question: to be judged."""
        document, entry = found.rows[:, 0], found.rows[:, 1]
        rare = entry >= self.entries
        rare[~rare] = seen[entry[~rare]] <= BOILERPLATE_DOCUMENTS
        return np.unique(document[rare]).tolist()

    def judge(self, batch: Units, seen: np.ndarray) -> list[Match]:
        """The passages for which the one document of `batch` must go, longest first; none if it may stay."""
        found = []
        count = len(batch.hashes)
        for hits in self._hits(batch):
            found += [self._match(batch, owner, first, last) for _, owner, first, last in self._whole(batch, hits)]
            rare = seen[hits.entries] <= BOILERPLATE_DOCUMENTS
            length, places = hits.length, hits.places
            own = _covered(places[rare], length, count) & ~_covered(places[~rare], length, count)
            for first, last in _runs(_covered(places, length, count)):
                if own[first:last].sum() >= (length + 1) // 2:
                    inside = rare & (places >= first) & (places < last)
                    found.append(self._match(batch, self._tables.where(int(hits.entries[inside][0]))[0], first, last))
        return sorted(set(found), key=lambda match: (match.start - match.end, match.start, match.against))

    def _match(self, batch: Units, owner: int, first: int, last: int) -> Match:
        return Match(self.names[owner], self.evaluation[owner], int(batch.starts[first]), int(batch.ends[last - 1]))

    def boilerplate(self, seen: np.ndarray, most: int) -> list[Boilerplate]:
        """The runs let pass because they stand in too many training documents, most frequent first; one sentence is told once."""
        common = np.flatnonzero(seen > BOILERPLATE_DOCUMENTS)
        where = sorted((-int(seen[entry]), *self._tables.where(entry)) for entry in common.tolist())
        passages: list[list[int]] = []  # negative documents, owner, first unit, one past the last
        for count, owner, place, length in where:
            if passages and passages[-1][:2] == [count, owner] and place <= passages[-1][3]:
                passages[-1][3] = place + length
            elif not any(owner == told[1] and place < told[3] and told[2] < place + length for told in passages):
                if len(passages) == most:
                    break
                passages.append([count, owner, place, place + length])
        return [self._told(*passage) for passage in passages]

    def _told(self, count: int, owner: int, first: int, last: int) -> Boilerplate:
        own = units([self.texts[owner]])
        last = min(last, len(own.starts))  # a run may reach into the answer
        return Boilerplate(-count, self.names[owner], self.texts[owner][int(own.starts[first]) : int(own.ends[last - 1])])


def _inside(batch: Units, places: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(which of the runs do not reach over their document's end, the documents of those)."""
    documents = np.searchsorted(batch.bounds, places, side="right") - 1
    inside = places + length <= batch.bounds[documents + 1]
    return inside, documents[inside]


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
