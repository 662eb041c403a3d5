"""The decontaminator: holds protected text, scans training text for it, and decides which documents are contaminated.

The docstring of the package states the rules.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path

import numpy as np

from lmworks.corpus.contamination.ngram_tables import NEAR, SHORTEST, Item, ProtectedNgrams, extend_ngrams
from lmworks.corpus.contamination.readings import scan_forms, scan_forms_with_positions
from lmworks.corpus.units import Symbols, Units, mostly_symbols, ngrams, ngrams_of, symbolic, symbolic_stretches, units
from lmworks.io.files import atomic_path
from lmworks.text.letters import spaceless_language, units_per_word

BOILERPLATE_DOCUMENTS = 10
MOST_EXEMPT = 50  # passages of boilerplate that are reported
ANSWER_WITHIN = 48
_MIN_SYMBOLS = 20  # symbols from which an item is searched for although it has too few words to trigger a comparison with symbols
_CONTEXT = 1024  # characters of a document, before and after a trigger, that are compared with symbols


HELD_OUT = "held out"


@dataclass(frozen=True)
class Question:
    """An item of an evaluation set: `name` is SET/ITEM, `answer` the text of the correct answer, or empty."""

    name: str
    text: str
    answer: str = ""


@dataclass(frozen=True)
class Match:
    """A passage of a training document (code points start to end) that also occurs in the protected text `against`.

    `evaluation` is true for an item of an evaluation set, false for a held-out document.
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
    """The set of an item named SET/ITEM."""
    return name.split("/", 1)[0]


@dataclass(frozen=True)
class Widespread:
    """A passage of the protected text `against` that occurs in `documents` training documents, more than ten.

    If it is held-out text, it is boilerplate and was `let_pass`; if it belongs to an evaluation set, it is contamination.
    """

    documents: int
    against: str
    passage: str
    let_pass: bool


@dataclass(frozen=True)
class Shared:
    """Wording of an evaluation set: `runs` n-grams that many of its items share and that are not searched for, for example `passage`."""

    set: str
    runs: int
    passage: str


@dataclass(frozen=True)
class Findings:
    """The protected runs that the documents of one part contain: (F, 2) int64 rows of (document, entry), unique and ascending.

    Entries below `Decontaminator.entries` are runs; from there on they are whole items.
    """

    rows: np.ndarray

    @classmethod
    def joined(cls, batches: Sequence[tuple[int, Findings]]) -> Findings:
        """The findings of several batches, each with the number of its first document."""
        shifted = [found.rows + np.array([first, 0]) for first, found in batches]
        return cls(np.concatenate([np.zeros((0, 2), dtype=np.int64), *shifted]))

    def save(self, path: Path) -> None:
        """Write the findings to a file, atomically."""
        with atomic_path(path) as aside, open(aside, "wb") as handle:
            np.save(handle, self.rows, allow_pickle=False)

    @classmethod
    def load(cls, path: Path) -> Findings:
        return cls(np.load(path, allow_pickle=False))


@dataclass(frozen=True)
class _Hits:
    """Protected runs of one length in a batch: first unit, entry and document of each; `grams` are their hashes, None for short
    questions.
    """

    length: int
    places: np.ndarray
    entries: np.ndarray
    documents: np.ndarray
    grams: np.ndarray | None = None


_Span = tuple[int, int, int, int]
"""(document, protected text, first unit, one past the last)"""


@dataclass(frozen=True)
class _Part:
    """An item, or its question or answer alone, in the form in which it is searched for. `context` is the answer beside a question that is
    searched for alone.
    """

    number: int
    name: str
    group: int
    question: str
    answer: str
    context: str
    symbols: Symbols


def _parts(asked: Sequence[str], replied: Sequence[str], evaluation: bool) -> Iterator[tuple[int, str, str, str, Symbols]]:
    """(item, question, answer, context, symbols) of what items are searched for: as a whole if question and answer are both prose or both
    consist of symbols, otherwise each alone. A question that is too short to be searched for alone goes with its answer.
    """
    made = symbolic if evaluation else mostly_symbols
    both = made([_joined(question, answer) for question, answer in zip(asked, replied, strict=True)])
    apart = (made(asked) != made(replied)) & (np.diff(units(asked).bounds) >= SHORTEST)
    for number, (question, answer) in enumerate(zip(asked, replied, strict=True)):
        if answer and apart[number]:
            of_question, of_answer = made([question, answer]).tolist()
            yield number, question, "", answer, "all" if of_question else ""
            yield number, "", answer, "", "all" if of_answer else ""
        else:
            yield number, question, answer, answer, "all" if both[number] else ""


class _ItemSearch:
    """Protected items under one way of splitting text into units, and the search for them in a batch that was split in the same way."""

    def __init__(self, symbols: Symbols, tables: ProtectedNgrams, first: int) -> None:
        self.symbols: Symbols = symbols
        self.tables, self.first = tables, first

    def hits(self, batch: Units) -> tuple[list[_Hits], list[_Span], list[tuple[int, int]]]:
        """Matching runs, with entries numbered over all views; items that are matched whole or nearly whole; and (document, character) of
        places that trigger a comparison with symbols.
        """
        tables, found = self.tables, []
        wholes: list[_Span] = []
        triggered: list[tuple[int, int]] = []
        for length, grams in ngrams_of(batch.hashes, tables.lengths):
            if length in tables.runs:
                table, first = tables.runs[length]
                places, entries = table.find(grams)
                inside, documents = _inside(batch, places, length)
                places = places[inside]
                found.append(_Hits(length, places, entries[inside] + first + self.first, documents, grams[places]))
                wholes += self._whole_questions(batch, found[-1])
            for five in tables.fives:
                if length == five.table.length:
                    places, entries = five.table.find(grams)
                    inside, documents = _inside(batch, places, length)
                    if five.begins.any():
                        found += self._short_hits(batch, places[five.begins[entries]], five.scale)
                    places, entries = places[inside], entries[inside]
                    triggers = five.triggers[entries]
                    triggered += zip(documents[triggers].tolist(), batch.starts[places[triggers]].tolist(), strict=True)
                    alike = five.alike[entries]
                    if five.near:
                        wholes += five.near.find(places[alike >= 0], alike[alike >= 0], documents[alike >= 0])
        return found, wholes, triggered

    def _short_hits(self, batch: Units, begun: np.ndarray, scale: int) -> Iterator[_Hits]:
        tables = self.tables
        for length, places, grams in extend_ngrams(batch.hashes, begun, SHORTEST * scale, tables.short_lengths[scale]):
            table, first = tables.shorts[scale, length]
            index, entries = table.find(grams)
            inside, documents = _inside(batch, places[index], length)
            places, entries = places[index][inside], entries[inside]
            keep = np.array(
                [
                    self._context_matches(batch, place, document, scale, int(table.hashes[entry]), length)
                    for place, document, entry in zip(places.tolist(), documents.tolist(), entries.tolist(), strict=True)
                ],
                dtype=bool,
            )
            yield _Hits(length, places[keep], entries[keep] + first + self.first, documents[keep])

    def _context_matches(self, batch: Units, place: int, document: int, scale: int, hashed: int, length: int) -> bool:
        """Whether the context that the short text at `place` requires, if any, is there."""
        for short in self.tables.short_items[scale, length][hashed]:
            wanted = len(short.context)
            if not wanted:
                return True
            reach = ANSWER_WITHIN * scale + wanted
            after = place + length, min(place + length + reach, int(batch.bounds[document + 1]))
            before = max(place - reach, int(batch.bounds[document])), place
            window = batch.hashes[slice(*(before if short.before else after))]
            begun = np.flatnonzero(window[: max(len(window) - wanted + 1, 0)] == short.context[0])
            if any(np.array_equal(window[at : at + wanted], short.context) for at in begun.tolist()):
                return True
        return False

    def _whole_questions(self, batch: Units, hits: _Hits) -> Iterator[_Span]:
        """Long evaluation questions that occur whole in a document."""
        if hits.grams is None or not self.tables.long:
            return
        for place, document, gram in zip(hits.places.tolist(), hits.documents.tolist(), hits.grams.tolist(), strict=True):
            for long in self.tables.long.get(gram, ()):
                start = place - long.at
                end = start + len(long.text)
                inside = batch.bounds[document] <= start and end <= batch.bounds[document + 1]
                if inside and np.array_equal(batch.hashes[start:end], long.text):
                    yield document, long.owner, start, end


class Decontaminator:
    """Protected texts. Call `protect` for all of them, then `scan`, `count_documents`, `suspect_documents` and `find_matches`."""

    def __init__(self, ngram: int) -> None:
        self.ngram = ngram
        self.names: list[str] = []
        self.evaluation: list[bool] = []
        self._numbers: list[int] = []  # the item that each protected text is, or is a part of
        self._texts: list[tuple[str, str]] = []  # questions and answers, without markup
        self._sets: dict[str, int] = {}
        self._sizes: list[int] = []
        self._items: dict[Symbols, list[Item]] = {"": [], "all": []}
        self._symbols: list[Symbols] = []
        self._trigger_ngrams: list[np.ndarray] = []  # runs of five words of the items that are compared with symbols
        self._has_short_symbolic_items = False  # whether such an item has too few words for a trigger

    def protect(self, names: Sequence[str], texts: Sequence[str], answers: Sequence[str] | None = None, *, evaluation: bool) -> None:
        """Add protected texts with their names (SET/ITEM, or the id of a held-out document).

        Only `evaluation` texts are also searched for as a whole; `answers` are their correct answers. Items that are too short for any
        search are counted in `trivial`, by set.

        A held-out document shorter than the n-gram is ignored.
        """
        assert "_views" not in self.__dict__, "protect everything before the first scan"
        first = self._numbers[-1] + 1 if self._numbers else 0
        asked = [scan_forms(text)[0] for text in texts]
        replied = [scan_forms(answer)[0] for answer in answers] if answers is not None else [""] * len(texts)
        groups = [self._set(name) if evaluation else -1 for name in names]
        parts = [
            _Part(first + number, names[number], groups[number], question, answer, context, symbols)
            for number, question, answer, context, symbols in _parts(asked, replied, evaluation)
        ]
        for symbols in self._items:
            self._protect([part for part in parts if part.symbols == symbols], symbols, evaluation)

    def _protect(self, parts: Sequence[_Part], symbols: Symbols, evaluation: bool) -> None:
        """Add texts that are compared with symbols, or without."""
        if symbols and parts:
            both = [_joined(part.question, part.answer) for part in parts]
            words, signs = units(both), np.diff(units(both, symbols).bounds)
            self._trigger_ngrams += [ngrams(words.hashes_of(place), NEAR) for place in range(len(parts))]
            self._has_short_symbolic_items |= bool(((np.diff(words.bounds) < NEAR) & (signs >= _MIN_SYMBOLS)).any())
        asked, replied, beside = (units([getattr(part, what) for part in parts], symbols) for what in ("question", "answer", "context"))
        for place, part in enumerate(parts):
            question, answer = asked.hashes_of(place), replied.hashes_of(place)
            batch = asked if len(question) else replied
            single = batch.single[batch.bounds[place] : batch.bounds[place + 1]]
            text = part.question if len(question) else part.answer
            scale = ceil(units_per_word(spaceless_language(text))) if len(single) and single.mean() > 0.5 else 1
            scale = max(scale, 2) if symbols else scale
            if evaluation or len(question) >= self.ngram * scale:
                self._items[symbols].append(Item(len(self.names), part.group, question, answer, scale, beside.hashes_of(place)))
                self.names.append(part.name)
                self.evaluation.append(evaluation)
                self._numbers.append(part.number)
                self._texts.append((part.question, part.answer))
                self._symbols.append(symbols)

    def _set(self, name: str) -> int:
        number = self._sets.setdefault(set_of(name), len(self._sets))
        if number == len(self._sizes):
            self._sizes.append(0)
        self._sizes[number] += 1
        return number

    @cached_property
    def _views(self) -> list[_ItemSearch]:
        """Words come first: they determine which documents must be compared with symbols, too."""
        views, first, triggers = [], 0, np.unique(np.concatenate([np.zeros(0, np.uint64), *self._trigger_ngrams]))
        for symbols, items in self._items.items():
            if items or (not symbols and len(triggers)):
                tables = ProtectedNgrams(items, self.ngram, self._sizes, triggers if not symbols else triggers[:0])
                views.append(_ItemSearch(symbols, tables, first))
                first += views[-1].tables.entries
        self._items.clear()
        return views

    @property
    def protected(self) -> dict[str, int]:
        """Number of items that are searched for, by evaluation set, and of held-out documents."""
        return self._count_by_set(looked_for=True)

    @property
    def trivial(self) -> dict[str, int]:
        """Number of items that are not searched for, by evaluation set: too short, or without a run that is their own."""
        return self._count_by_set(looked_for=False)

    def _count_by_set(self, looked_for: bool) -> dict[str, int]:
        found = {self._numbers[owner] for view in self._views for owner in view.tables.owners}
        named = zip(self._numbers, self.names, self.evaluation, strict=True)
        sets = {number: set_of(name) if evaluation else HELD_OUT for number, name, evaluation in named}
        return dict(sorted(Counter(one for number, one in sets.items() if (number in found) == looked_for).items()))

    @property
    def entries(self) -> int:
        """Number of protected runs."""
        return sum(view.tables.entries for view in self._views)

    @cached_property
    def _is_evaluation_run(self) -> np.ndarray:
        """(entries,) bool: the runs of evaluation sets."""
        owners = [np.zeros(0, dtype=np.int64), *(view.tables.owner_of for view in self._views)]
        return np.array([*self.evaluation, False], dtype=bool)[np.concatenate(owners)]

    def scan(self, texts: Sequence[str]) -> Findings:
        """Find protected runs in texts; documents are numbered from 0."""
        read = [(number, reading) for number, text in enumerate(texts) for reading in scan_forms(text)]
        found = [np.zeros((0, 2), dtype=np.int64)]
        triggered: list[tuple[int, int]] = []
        if self._has_short_symbolic_items:
            triggered += zip(*(column.tolist() for column in symbolic_stretches([text for _, text in read])), strict=True)
        for view in self._views:
            chosen = list(_excerpts(read, triggered)) if view.symbols else read
            if not chosen:
                continue
            numbers = np.array([number for number, _ in chosen])
            hits, wholes, triggers = view.hits(units([text for _, text in chosen], view.symbols))
            triggered += triggers
            found += [np.stack((numbers[one.documents], one.entries), axis=1) for one in hits]
            found.append(np.array([(numbers[document], self.entries + owner) for document, owner, _, _ in wholes], np.int64).reshape(-1, 2))
        return Findings(np.unique(np.concatenate(found), axis=0))

    def count_documents(self, parts: Iterable[Findings]) -> np.ndarray:
        """(entries,) the number of training documents, over all parts, that contain each protected run."""
        count = np.zeros(self.entries, dtype=np.int64)
        for found in parts:
            entries = found.rows[:, 1]
            count += np.bincount(entries[entries < self.entries], minlength=self.entries)
        return count

    def suspect_documents(self, found: Findings, document_counts: np.ndarray) -> list[int]:
        """The documents of a part with a run that is not boilerplate, or with a whole question. They need a decision by `find_matches`."""
        document, entry = found.rows[:, 0], found.rows[:, 1]
        leaks = entry >= self.entries
        leaks[~leaks] = self._not_boilerplate(entry[~leaks], document_counts)
        return np.unique(document[leaks]).tolist()

    def _not_boilerplate(self, entries: np.ndarray, document_counts: np.ndarray) -> np.ndarray:
        """(E,) bool: which of the runs are not boilerplate."""
        found: np.ndarray = self._is_evaluation_run[entries] | (document_counts[entries] <= BOILERPLATE_DOCUMENTS)
        return found

    def find_matches(self, text: str, document_counts: np.ndarray) -> list[Match]:
        """The passages that make a document contaminated, longest first; empty if it is clean."""
        found = []
        for reading, places in scan_forms_with_positions(text):
            for view in self._views:
                batch = units([reading], view.symbols)
                for owner, first, last in self._contaminated_spans(view, batch, document_counts):
                    start, end = int(places[batch.starts[first]]), int(places[batch.ends[last - 1] - 1]) + 1
                    found.append(Match(self.names[owner], self.evaluation[owner], start, end))
        return sorted(set(found), key=lambda match: (match.start - match.end, match.start, match.against))

    def _contaminated_spans(self, view: _ItemSearch, batch: Units, document_counts: np.ndarray) -> list[tuple[int, int, int]]:
        hits, wholes, _ = view.hits(batch)
        count, found = len(batch.hashes), [(owner, first, last) for _, owner, first, last in wholes]
        for one in hits:
            rare, length, places = self._not_boilerplate(one.entries, document_counts), one.length, one.places
            own = _covered(places[rare], length, count) & ~_covered(places[~rare], length, count)
            for first, last in _runs(_covered(places, length, count)):
                if own[first:last].sum() >= (length + 1) // 2:
                    inside = rare & (places >= first) & (places < last)
                    found.append((self._locate_entry(int(one.entries[inside][0]))[1], first, last))
        return found

    def _locate_entry(self, entry: int) -> tuple[_ItemSearch, int, int, int]:
        """(view, protected text, first unit in it, length) of an entry."""
        view = next(view for view in reversed(self._views) if view.first <= entry)
        return view, *view.tables.where(entry - view.first)

    def widespread_runs(self, document_counts: np.ndarray, most_exempt: int = MOST_EXEMPT) -> tuple[list[Widespread], int]:
        """The passages that occur in more than ten training documents, most frequent first; overlapping runs are merged.

        All passages of evaluation sets, which are leaks, and `most_exempt` of held-out text; and the number of all of held-out text.
        """
        common = np.flatnonzero(document_counts > BOILERPLATE_DOCUMENTS)
        where = sorted((-int(document_counts[entry]), *self._locate_entry(entry)[1:]) for entry in common.tolist())
        passages: list[list[int]] = []  # negative documents, owner, first unit, one past the last
        covered: dict[int, set[int]] = defaultdict(set)  # units of each owner in a passage: there may be too many passages to compare with
        for count, owner, place, length in where:
            if passages and passages[-1][:2] == [count, owner] and place <= passages[-1][3]:
                passages[-1][3] = place + length
            elif covered[owner].isdisjoint(range(place, place + length)):
                passages.append([count, owner, place, place + length])
            else:
                continue
            covered[owner].update(range(place, place + length))
        exempt = [passage for passage in passages if not self.evaluation[passage[1]]]
        left_out = {tuple(passage) for passage in exempt[most_exempt:]}
        found = [
            Widespread(-count, self.names[owner], self._passage(owner, first, last), not self.evaluation[owner])
            for count, owner, first, last in passages
            if (count, owner, first, last) not in left_out
        ]
        return found, len(exempt)

    def shared(self) -> list[Shared]:
        """The runs that many items of an evaluation set share, which are therefore not searched for."""
        names = {number: name for name, number in self._sets.items()}
        return [
            Shared(names[number], runs, self._passage(owner, place, place + length))
            for view in self._views
            for number, (runs, owner, place, length) in sorted(view.tables.shared.items())
        ]

    def _passage(self, owner: int, first: int, last: int) -> str:
        """A range of units of a protected text, numbered through question and answer, which are split apart: a tag ends within them."""
        found, before = [], 0
        for text in self._texts[owner]:
            own = units([text], self._symbols[owner])
            count = len(own.starts)
            start, end = max(first - before, 0), min(last - before, count)
            if start < end:
                found.append(text[int(own.starts[start]) : int(own.ends[end - 1])])
            before += count
        return "\n".join(found)


def _excerpts(read: Sequence[tuple[int, str]], triggered: Iterable[tuple[int, int]]) -> Iterator[tuple[int, str]]:
    """The text around places that trigger a comparison with symbols, given as (index into `read`, character)."""
    reached = 0, 0
    for number, place in sorted(triggered):
        document, text = read[number]
        start, end = max(place - _CONTEXT, 0), place + _CONTEXT
        if reached[0] == number and place + _CONTEXT // 2 < reached[1]:
            continue
        yield document, text[start:end]
        reached = number, end


def _joined(text: str, answer: str) -> str:
    return f"{text}\n{answer}" if answer else text


def _inside(batch: Units, places: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(which runs end inside their document, the documents of those)."""
    documents = np.searchsorted(batch.bounds, places, side="right") - 1
    inside = places + length <= batch.bounds[documents + 1]
    return inside, documents[inside]


def _covered(places: np.ndarray, length: int, count: int) -> np.ndarray:
    """(count,) bool: the units inside a run of `length` that begins at one of `places`."""
    edges = np.zeros(count + 1, dtype=np.int64)
    np.add.at(edges, places, 1)
    np.add.at(edges, places + length, -1)
    return np.cumsum(edges)[:-1] > 0


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """(first, one past the last) of each stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
