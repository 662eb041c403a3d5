"""The documents of a source as an array of 50 bytes per document, for comparing two corpora.

`lmworks corpus diff`: documents that are in only one of two corpora, and decisions that differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lmworks.corpus.analysis.prepared import PreparedCorpus
from lmworks.corpus.document import MOST_VARIANTS, split_id, variant_id
from lmworks.corpus.engine.job import Piece
from lmworks.corpus.units import mix
from lmworks.ui.terminal import bar

RECORD = np.dtype(
    [
        ("origin", "<u8"),
        ("text", "<u8"),  # hash of the text in the corpus; 0 where the document was not kept
        ("part", "<u4"),
        ("number", "<u8"),
        ("bytes", "<i8"),
        ("source", "<u2"),
        ("fate", "<u2"),
        ("output", "<u2"),
    ]
)
UNREAD = "not read"
_ODD = np.uint64(0x9E3779B97F4A7C15)


class NameNumbers:
    """Numbers the names of sources, fates (with reasons) and outputs; 0 means none."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, int]] = {column: {UNREAD: 0} for column in ("source", "fate", "output")}
        self._names: dict[str, list[str]] = {column: [UNREAD] for column in self._numbers}

    def number(self, column: str, name: str) -> int:
        """The number of a name; a new name gets the next number."""
        numbers, names = self._numbers[column], self._names[column]
        if name not in numbers:
            numbers[name] = len(names)
            names.append(name)
        return numbers[name]

    def source(self, name: str) -> int:
        return self.number("source", name)

    def name(self, column: str, number: int) -> str:
        return self._names[column][number]


@dataclass(frozen=True)
class Records:
    """Rows of `RECORD`. `keys` (N,) uint64 identify documents of one source by their origins; documents with equal origins are numbered."""

    rows: np.ndarray
    keys: np.ndarray

    def take(self, places: np.ndarray) -> Records:
        return Records(self.rows[places], self.keys[places])

    def without(self, places: np.ndarray) -> Records:
        left = np.ones(len(self.rows), dtype=bool)
        left[places] = False
        return self.take(np.flatnonzero(left))

    def kept_places(self) -> np.ndarray:
        return np.flatnonzero(self.rows["text"])

    def kept(self) -> Records:
        return self.take(self.kept_places())

    def of(self, source: int) -> Records:
        return self.take(np.flatnonzero(self.rows["source"] == source))

    def texts_at_origins(self) -> np.ndarray:
        """(N,) uint64 that are equal if both text and origin are equal."""
        return mix(self.rows["text"] + self.keys * _ODD)

    def unread(self) -> Records:
        """As many records of documents that do not exist."""
        return Records(np.zeros(len(self.rows), RECORD), self.keys)

    def id(self, place: int, labels: NameNumbers) -> str:
        row = self.rows[place]
        if not row["source"]:
            return UNREAD
        number, variant = divmod(int(row["number"]), MOST_VARIANTS + 1)
        return variant_id(f"{labels.name('source', row['source'])}/{row['part']}/{number}", variant)

    @classmethod
    def joined(cls, parts: Iterable[Records]) -> Records:
        parts = list(parts)
        rows = np.concatenate([np.zeros(0, RECORD), *(part.rows for part in parts)])
        return cls(rows, np.concatenate([np.zeros(0, np.uint64), *(part.keys for part in parts)]))


def load_records(corpus: PreparedCorpus, name: str, labels: NameNumbers, advance: Callable[[], None]) -> Records:
    """The documents of a source; empty if the corpus has no such source. `advance` is called after each part."""
    parts = []
    for piece in corpus.pieces:
        if piece.source.name == name:
            parts.append(_of_piece(corpus, piece, labels))
            advance()
    rows = np.concatenate([np.zeros(0, RECORD), *parts])
    return Records(rows, number_repeats(rows["origin"]))


def _of_piece(corpus: PreparedCorpus, piece: Piece, labels: NameNumbers) -> np.ndarray:
    parts = []
    for _, table in corpus.decisions(piece, ("id", "origin", "bytes", "fate", "reason")):
        rows = np.zeros(table.num_rows, RECORD)
        fates = zip(table["fate"].to_pylist(), table["reason"].to_pylist(), strict=True)
        rows["origin"] = _hashes(table["origin"].to_pylist())
        rows["number"] = _numbers(table["id"].to_pylist())
        rows["bytes"] = table["bytes"].to_numpy()
        rows["fate"] = [labels.number("fate", f"{fate} {reason}".strip()) for fate, reason in fates]
        parts.append(rows)
    rows = np.concatenate([np.zeros(0, RECORD), *parts])
    rows["part"], rows["source"] = piece.number, labels.source(piece.source.name)
    for path, _, table in corpus.kept(piece):
        numbers = np.array(_numbers(table["id"].to_pylist()), dtype=np.uint64)
        places = np.searchsorted(rows["number"], numbers)  # documents are in the order they were read
        rows["text"][places] = np.maximum(_hashes(table["text"].to_pylist()), np.uint64(1))
        rows["output"][places] = labels.number("output", f"{path.parent.parent.name}/{path.parent.name}")
    return rows


def _numbers(ids: Sequence[str]) -> list[int]:
    """The number of each document in its part, combined with the number of its variant."""
    return [number * (MOST_VARIANTS + 1) + variant for _, _, number, variant in map(split_id, ids)]


def _hashes(texts: Sequence[str]) -> np.ndarray:
    digests = b"".join(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype="<u8")


def number_repeats(hashes: np.ndarray) -> np.ndarray:
    """(N,) unique uint64: each hash, mixed with the number of equal hashes before it."""
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    first = np.searchsorted(ranked, ranked)
    found = np.empty(len(hashes), dtype=np.uint64)
    found[order] = ranked + (np.arange(len(hashes)) - first).astype(np.uint64) * _ODD
    return mix(found)


_EXAMPLES = 3
KINDS = ("lost", "gained", "moved", "changed", "dropped otherwise")


@dataclass
class Group:
    """Documents of a source with the same difference: `before` and `after` are fates with reasons, or outputs."""

    kind: str
    before: str
    after: str
    documents: int = 0
    bytes: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)


@dataclass
class SourceDifference:
    """The differences in one source. `same` counts documents with the same text in the same output of both corpora, `renamed` those of them
    with another origin.
    """

    name: str
    before: int = 0
    after: int = 0
    same: int = 0
    renamed: int = 0
    groups: list[Group] = field(default_factory=list)


def diff(one: PreparedCorpus, other: PreparedCorpus) -> list[SourceDifference]:
    """Compare two corpora, source by source.

    Documents that both corpora kept are matched by text: first at the same origin, then anywhere in the source. The others are matched by
    origin. Kept documents that are still unmatched are matched by text across sources. So if rows were inserted into a file, only kept
    documents are matched correctly. Each kept text is read once. Memory: 250 bytes per document of the largest source, for both corpora and
    all intermediate arrays.
    """
    labels, found = NameNumbers(), {}
    unmatched: list[tuple[Records, Records]] = []
    names = list(dict.fromkeys(source.name for corpus in (one, other) for source in corpus.job.sources))
    with bar("compare", sum(len(corpus.pieces) for corpus in (one, other))) as progress:
        for name in names:
            progress.note(name)
            before, after = (load_records(corpus, name, labels, progress.advance) for corpus in (one, other))
            found[name] = SourceDifference(name, len(before.kept().rows), len(after.kept().rows))
            unmatched.append(_compare(found[name], before, after, labels))
    _match_across_sources(found, Records.joined(pair[0] for pair in unmatched), Records.joined(pair[1] for pair in unmatched), labels)
    for difference in found.values():
        difference.groups.sort(key=lambda group: (KINDS.index(group.kind), -group.documents, group.before, group.after))
    return list(found.values())


def _compare(difference: SourceDifference, before: Records, after: Records, labels: NameNumbers) -> tuple[Records, Records]:
    """Match the documents of one source; returns the kept documents of each corpus that have no match."""
    for by_origin in (True, False):
        old, new = before.kept(), after.kept()
        left, right = _match_keys(*((one.texts_at_origins() if by_origin else number_repeats(one.rows["text"])) for one in (old, new)))
        same = _compare_equal_texts(difference, old.take(left), new.take(right), labels)
        difference.renamed += 0 if by_origin else same
        before, after = before.without(before.kept_places()[left]), after.without(after.kept_places()[right])
    left, right = _match_keys(before.keys, after.keys)
    had, has = before.rows["text"][left] > 0, after.rows["text"][right] > 0
    same_fate = before.rows["fate"][left] == after.rows["fate"][right]
    for kind, chosen, column in (
        ("changed", had & has, "output"),
        ("lost", had & ~has, "fate"),
        ("gained", ~had & has, "fate"),
        ("dropped otherwise", ~had & ~has & ~same_fate, "fate"),
    ):
        _add_groups(difference, kind, before.take(left[chosen]), after.take(right[chosen]), column, labels)
    return before.without(left).kept(), after.without(right).kept()


def _match_keys(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The indices of equal keys; each key occurs once per side."""
    _, left, right = np.intersect1d(old, new, assume_unique=True, return_indices=True)
    return left, right


def _compare_equal_texts(difference: SourceDifference, old: Records, new: Records, labels: NameNumbers) -> int:
    """Compare pairs of documents with equal texts; returns how many are in the same output."""
    same_place = old.rows["output"] == new.rows["output"]
    moved = np.flatnonzero(~same_place)
    _add_groups(difference, "moved", old.take(moved), new.take(moved), "output", labels)
    same = int(np.count_nonzero(same_place))
    difference.same += same
    return same


def _match_across_sources(found: dict[str, SourceDifference], old: Records, new: Records, labels: NameNumbers) -> None:
    """Match the remaining documents by text across sources; those without a match are lost or gained."""
    left, right = _match_keys(number_repeats(old.rows["text"]), number_repeats(new.rows["text"]))
    lost, gained = old.without(left), new.without(right)
    for name, difference in found.items():
        mine = old.rows["source"][left] == labels.source(name)
        _compare_equal_texts(difference, old.take(left[mine]), new.take(right[mine]), labels)
        gone, come = lost.of(labels.source(name)), gained.of(labels.source(name))
        _add_groups(difference, "lost", gone, gone.unread(), "fate", labels)
        _add_groups(difference, "gained", come.unread(), come, "fate", labels)


def _add_groups(difference: SourceDifference, kind: str, before: Records, after: Records, column: str, labels: NameNumbers) -> None:
    """Count pairs of documents by their values of `column` before and after."""
    pairs = np.stack([before.rows[column], after.rows[column]], axis=1) if len(before.rows) else np.zeros((0, 2), np.uint16)
    for was, now in np.unique(pairs, axis=0).tolist():
        chosen = np.flatnonzero((pairs == (was, now)).all(axis=1))
        size = after if kind == "gained" else before
        group = Group(kind, labels.name(column, was), labels.name(column, now), len(chosen), int(size.rows["bytes"][chosen].sum()))
        for place in chosen[:_EXAMPLES]:
            ids = {"before": before.id(place, labels), "after": after.id(place, labels)}
            group.examples.append({side: identity for side, identity in ids.items() if identity != UNREAD})
        difference.groups.append(group)


def differs(differences: Iterable[SourceDifference]) -> bool:
    """Whether there is any difference."""
    return any(difference.groups for difference in differences)


def as_json(differences: Iterable[SourceDifference]) -> list[dict[str, Any]]:
    """The differences as JSON values."""
    return [asdict(difference) for difference in differences]
