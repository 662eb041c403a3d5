"""`lmworks corpus diff`: which documents one corpus has and another has not, and what was decided otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lmworks.corpus.evidence.opened import Prepared
from lmworks.corpus.evidence.records import UNREAD, Labels, Records, load, occurrences
from lmworks.progress import bar

_EXAMPLES = 3
KINDS = ("lost", "gained", "moved", "changed", "dropped otherwise")


@dataclass
class Group:
    """Documents of a source to which the same happened: `before` and `after` are fates with their reasons, or outputs."""

    kind: str
    before: str
    after: str
    documents: int = 0
    bytes: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)


@dataclass
class SourceDifference:
    """What differs in one source. `same` are documents that both have in the same place, `renamed` those of them with another origin."""

    name: str
    before: int = 0
    after: int = 0
    same: int = 0
    renamed: int = 0
    groups: list[Group] = field(default_factory=list)


def diff(one: Prepared, other: Prepared) -> list[SourceDifference]:
    """Compare two corpora, source by source.

    Documents are matched by source and origin, what is left of those kept by their text, whatever its source. Of each kept document the
    text is read once. Memory: 50 bytes on each side for each document of the largest source, and for those kept without a match.
    """
    labels, found = Labels(), {}
    unmatched: list[tuple[Records, Records]] = []
    names = list(dict.fromkeys(source.name for corpus in (one, other) for source in corpus.job.sources))
    with bar("compare", sum(len(corpus.pieces) for corpus in (one, other))) as progress:
        for name in names:
            progress.note(name)
            before, after = (load(corpus, name, labels, progress.advance) for corpus in (one, other))
            kept = int(np.count_nonzero(before.rows["text"])), int(np.count_nonzero(after.rows["text"]))
            found[name] = SourceDifference(name, *kept)
            _compare(found[name], before, after, labels, unmatched)
    _by_text(found, [pair[0] for pair in unmatched], [pair[1] for pair in unmatched], labels)
    for difference in found.values():
        difference.groups.sort(key=lambda group: (KINDS.index(group.kind), -group.documents, group.before, group.after))
    return list(found.values())


def _compare(
    difference: SourceDifference, before: Records, after: Records, labels: Labels, unmatched: list[tuple[Records, Records]]
) -> None:
    _, left, right = np.intersect1d(before.keys, after.keys, assume_unique=True, return_indices=True)
    old, new = before.rows[left], after.rows[right]
    had, has = old["text"] > 0, new["text"] > 0
    same_text, same_place = old["text"] == new["text"], old["output"] == new["output"]
    same_fate = old["fate"] == new["fate"]
    difference.same += int(np.count_nonzero(had & has & same_text & same_place))
    for kind, chosen, column in (
        ("changed", had & has & ~same_text, "output"),
        ("moved", had & has & same_text & ~same_place, "output"),
        ("lost", had & ~has, "fate"),
        ("gained", ~had & has, "fate"),
        ("dropped otherwise", ~had & ~has & ~same_fate, "fate"),
    ):
        _group(difference, kind, before.some(left[chosen]), after.some(right[chosen]), column, labels)
    rest = [records.without(places) for records, places in ((before, left), (after, right))]
    unmatched.append((rest[0].kept(), rest[1].kept()))


def _by_text(
    found: dict[str, SourceDifference], before: Iterable[Records], after: Iterable[Records], labels: Labels
) -> None:
    """Match kept documents whose origin the other corpus has not."""
    old, new = Records.joined(before), Records.joined(after)
    _, left, right = np.intersect1d(
        occurrences(old.rows["text"]), occurrences(new.rows["text"]), assume_unique=True, return_indices=True
    )
    same_place = old.rows["output"][left] == new.rows["output"][right]
    for name, difference in found.items():
        of = labels.source(name)
        mine = old.rows["source"][left] == of
        renamed = int(np.count_nonzero(mine & same_place))
        difference.same += renamed
        difference.renamed += renamed
        chosen = mine & ~same_place
        _group(difference, "moved", old.some(left[chosen]), new.some(right[chosen]), "output", labels)
        for kind, records, matched in (("lost", old, left), ("gained", new, right)):
            alone = records.without(matched)
            alone = alone.some(np.flatnonzero(alone.rows["source"] == of))
            nothing = alone.unread()
            _group(difference, kind, *((alone, nothing) if kind == "lost" else (nothing, alone)), "fate", labels)


def _group(difference: SourceDifference, kind: str, before: Records, after: Records, column: str, labels: Labels) -> None:
    """Count documents, side by side, by what they were and what they are."""
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
    """Whether anything does."""
    return any(difference.groups for difference in differences)


def as_json(differences: Iterable[SourceDifference]) -> list[dict[str, Any]]:
    """For machines."""
    return [asdict(difference) for difference in differences]
