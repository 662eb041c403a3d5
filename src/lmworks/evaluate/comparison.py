"""The comparison of models with the first of them, as one document; failures in groups, by kind, subject and length of the prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.evaluate.bits_per_byte import ANSWERS
from lmworks.evaluate.results import KINDS, Answers, Outcome, Results
from lmworks.evaluate.sets.items import shortened
from lmworks.evaluate.statistics import FEWEST_CLUSTERS, HOW, Difference, Pairs, compare_bits, compare_counts, compare_pairs, corrected

_QUARTILES = 4
_MOST_TEXT = 600


def failures(results: Results, examples: int = 3) -> dict[str, dict[str, Any]]:
    """Score -> its failures in groups, as JSON values; scores without items are left out."""
    return {name: _of_score(results, answers, examples) for name, answers in results.scores.items() if answers.items}


def _of_score(results: Results, answers: Answers, examples: int) -> dict[str, Any]:
    items = list((answers.items or {}).values())
    subjects = sorted({one.subject for one in items} - {""})
    return {
        "set": answers.set,
        **_count(items),
        "by_subject": [{"subject": name, **_count(one for one in items if one.subject == name)} for name in subjects],
        "by_length": [{"tokens": [low, high], **_count(part)} for low, high, part in _by_length(items)],
        "examples": {
            kind: [example(results, answers, one) for one in [one for one in items if one.failure == kind][:examples]]
            for kind in KINDS
            if any(one.failure == kind for one in items)
        },
    }


def example(results: Results, answers: Answers, one: Outcome) -> dict[str, Any]:
    """An item to read: question, right answer, and what the model answered, each shortened."""
    question, right = results.questions.get((answers.set, one.id), ("", ""))
    texts = {"question": question, "right": right, "answer": one.answer}
    return {"id": one.id, "subject": one.subject, **{key: shortened(text, _MOST_TEXT) for key, text in texts.items()}}


def _count(items: Iterable[Outcome]) -> dict[str, Any]:
    items = list(items)
    kinds = Counter(one.failure for one in items if one.failure)
    return {"n": len(items), "failed": sum(kinds.values()), "kinds": {kind: kinds[kind] for kind in KINDS if kinds[kind]}}


def _by_length(items: Sequence[Outcome]) -> list[tuple[int, int, list[Outcome]]]:
    """Quarters of the items by prompt length (fewer where many are equally long), with least and greatest length in tokens."""
    lengths = np.array([one.tokens for one in items])
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, _QUARTILES + 1)[1:-1], method="inverted_cdf"))
    places = np.searchsorted(edges, lengths, side="left")  # an edge belongs to the shorter ones
    parts = [[one for one, place in zip(items, places, strict=True) if place == number] for number in range(len(edges) + 1)]
    found = [(min(one.tokens for one in part), max(one.tokens for one in part), part) for part in parts if part]
    return found if len(found) > 1 else []


OVERALL = "all domains"
_MOST_SUBJECTS = 10
_FEWEST_DOCUMENTS = 6  # of fewer, no sign-flip test can show anything at 5%


class NothingInCommon(UserError):
    """Two models have no score and no held-out text in common."""


def compare(models: Sequence[Results], examples: int = 3) -> dict[str, Any]:
    """Compare each model with the first. All tests of the document are corrected together.

    Raises `NothingInCommon` if a model has nothing in common with the first.
    """
    parts = [_Pairing(models[0], other) for other in models[1:]]
    fixed = iter(corrected([difference for part in parts for difference in part.differences.values()]))
    for part in parts:
        part.differences = {key: next(fixed) for key in part.differences}
    return {
        "models": [{"name": one.name, "origin": one.origin, "published": one.published, "notes": one.notes} for one in models],
        "comparisons": [part.to_json(examples) for part in parts],
        "failures": {one.name: failures(one, examples) for one in models if not one.published},
        "tests": sum(len(part.differences) for part in parts),
        "how": HOW,
    }


class _Pairing:
    """One model beside the first. `differences` has a key (kind, name) for each test, `common` the items of a score that both answered."""

    def __init__(self, a: Results, b: Results) -> None:
        self.a, self.b = a, b
        self.differences: dict[tuple[str, str], Difference] = {}
        self.not_comparable: dict[str, str] = {}
        self.common: dict[str, list[tuple[Outcome, Outcome]]] = {}
        pairs: dict[str, Pairs] = {}
        for name in dict.fromkeys([*a.scores, *b.scores]):
            if reason := _not_comparable(name, a, b):
                self.not_comparable[name] = reason
                continue
            mine, theirs = a.scores[name], b.scores[name]
            if mine.items is None or theirs.items is None:
                counts = (round(mine.score * mine.n), mine.n, round(theirs.score * theirs.n), theirs.n)
                self.differences["score", name] = compare_counts(*counts)
                continue
            both = _of_equal_ids(mine, theirs)
            common = [pair for pair in both if _same_question(mine.set, *pair, a, b)]
            if len(common) < len(both):
                others = f"{len(both) - len(common)} of {len(both)}"
                what = f"{others} items of equal ids ask something else: the rows or the prompt have changed"
                self.not_comparable[name] = what + ("; they are left out" if common else "")
            if common:
                self.common[name] = common
                pairs[name] = _pairs(mine.set, common)
        each, pooled = compare_pairs(list(pairs.values())) if pairs else ([], None)
        self.differences |= {("score", name): found for name, found in zip(pairs, each, strict=True)}
        if pooled is not None:
            self.differences["pooled", ""] = pooled
        self._compare_documents()
        if not self.differences:
            raise NothingInCommon(
                f"{a.name} and {b.name} have no score and no held-out text in common ({_first(self.not_comparable)}); "
                "evaluate both alike, as with: lmworks evaluate MODEL --tasks arc-easy --form cloze"
            )

    def _compare_documents(self) -> None:
        common = [key for key in self.a.documents if key in self.b.documents]
        if len(common) < _FEWEST_DOCUMENTS:
            if self.a.documents and self.b.documents:
                self.not_comparable["held-out bits per byte"] = f"only {len(common)} held-out documents were measured with both"
            return
        counts = Counter(self.a.documents[key].domain for key in common)
        domains = sorted(domain for domain, count in counts.items() if count >= _FEWEST_DOCUMENTS)
        text = [key for key in common if not self.a.documents[key].domain.startswith(ANSWERS)]
        several = len({self.a.documents[key].domain for key in text}) > 1
        for domain in (OVERALL, *domains) if several else domains:
            keys = text if domain == OVERALL else [key for key in common if domain == self.a.documents[key].domain]
            ours, theirs = ([side.documents[key] for key in keys] for side in (self.a, self.b))
            self.differences["bits_per_byte", domain] = compare_bits(
                [one.bits for one in ours], [one.bits for one in theirs], [one.bytes for one in ours]
            )

    def to_json(self, examples: int) -> dict[str, Any]:
        found: dict[str, Any] = {"a": self.a.name, "b": self.b.name, "scores": [], "pooled": None, "bits_per_byte": []}
        for (kind, name), difference in self.differences.items():
            row = difference.to_json()
            if kind == "pooled":
                found["pooled"] = row | {"scores": sum(key == "score" for key, _ in self.differences)}
            elif kind == "bits_per_byte":
                found["bits_per_byte"].append({"domain": name, **row})
            else:
                found["scores"].append({"score": name, "set": self.a.scores[name].set, **row, **self._changed(name, examples)})
        found["not_comparable"] = [{"score": name, "reason": reason} for name, reason in self.not_comparable.items()]
        return found

    def _changed(self, name: str, examples: int) -> dict[str, Any]:
        """Items that only A answered correctly, and those that only B did."""
        mine, theirs = self.a.scores[name], self.b.scores[name]
        if mine.items is None or theirs.items is None:
            return {}
        common = self.common[name]
        lost = [pair for pair in common if pair[0].mark > pair[1].mark]
        gained = [pair for pair in common if pair[0].mark < pair[1].mark]
        return {
            "lost": len(lost),
            "gained": len(gained),
            "only_a": len(mine.items) - len(common),
            "only_b": len(theirs.items) - len(common),
            "by_subject": _by_subject(common, lost, gained),
            "examples": {
                kind: [self._example(mine, pair) for pair in _clearest(part)[:examples]]
                for kind, part in (("lost", lost), ("gained", gained))
            },
            "lost_ids": [one.id for one, _ in lost],
            "gained_ids": [one.id for one, _ in gained],
        }

    def _example(self, answers: Answers, pair: tuple[Outcome, Outcome]) -> dict[str, Any]:
        source = self.a if (answers.set, pair[0].id) in self.a.questions else self.b
        shown = example(source, answers, pair[0])
        del shown["answer"]
        return shown | {"a": _told(pair[0]), "b": _told(pair[1])}


def _told(one: Outcome) -> str:
    return one.answer or (f"({one.failure})" if one.failure else "(right)")


def _clearest(pairs: Sequence[tuple[Outcome, Outcome]]) -> list[tuple[Outcome, Outcome]]:
    """Those first in which the likelihood of the right answer has changed most, where it is known."""
    change = lambda pair: abs((pair[1].value or 0.0) - (pair[0].value or 0.0))  # noqa: E731
    return sorted(pairs, key=lambda pair: -change(pair))


def _by_subject(
    common: Sequence[tuple[Outcome, Outcome]], lost: Sequence[tuple[Outcome, Outcome]], gained: Sequence[tuple[Outcome, Outcome]]
) -> list[dict[str, Any]]:
    """Subjects in which most was lost on balance."""
    n, minus, plus = (Counter(one.subject for one, _ in part) for part in (common, lost, gained))
    if set(n) == {""}:
        return []
    order = sorted(n, key=lambda name: (plus[name] - minus[name], name))
    return [{"subject": name, "n": n[name], "lost": minus[name], "gained": plus[name]} for name in order[:_MOST_SUBJECTS]]


def _not_comparable(name: str, a: Results, b: Results) -> str:
    for one, other in ((a, b), (b, a)):
        if name not in one.scores:
            set_ = other.scores[name].set
            same = [score for score, answers in one.scores.items() if answers.set == set_]
            if same:
                return f"{one.name} has {set_} only in another formulation: {', '.join(same)}"
            return f"{one.name} has no score of {set_}"
    mine, theirs = a.scores[name], b.scores[name]
    if mine.items is None or theirs.items is None:
        return ""
    if mine.examples != theirs.examples:
        return "the worked examples before the questions differ"
    if mine.sampling != theirs.sampling:
        return f"the replies of {a.name} are {_drawn(mine)}, and those of {b.name} {_drawn(theirs)}"
    if not mine.items.keys() & theirs.items.keys():
        return "no item was asked of both"
    return ""


def _drawn(answers: Answers) -> str:
    return f"drawn at {answers.sampling}" if answers.sampling else "greedy"


def _first(reasons: dict[str, str]) -> str:
    return next((f"{name}: {reason}" for name, reason in reasons.items()), "neither has any")


def _of_equal_ids(mine: Answers, theirs: Answers) -> list[tuple[Outcome, Outcome]]:
    others = theirs.items or {}
    return [(one, others[key]) for key, one in (mine.items or {}).items() if key in others]


def _same_question(set_: str, one: Outcome, other: Outcome, a: Results, b: Results) -> bool:
    """Whether two outcomes of equal ids are of one item. An id is often the number of a row, and rows change between evaluations."""
    if one.asked and other.asked:
        return one.asked == other.asked
    asked, also = a.questions.get((set_, one.id)), b.questions.get((set_, other.id))
    return asked is None or also is None or asked == also


def _pairs(set_: str, common: Sequence[tuple[Outcome, Outcome]]) -> Pairs:
    clusters = [one.passage or one.subject or one.id for one, _ in common]
    clustered = FEWEST_CLUSTERS <= len(set(clusters)) < len(common)
    units = clusters if clustered else [one.id for one, _ in common]
    return Pairs(set_, units, [one.mark for one, _ in common], [other.mark for _, other in common], clustered)
