"""Failures in groups: by kind, by subject and by the length of the prompt, with examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lmworks.evaluate.compare.results import KINDS, Answers, Outcome, Results
from lmworks.evaluate.items import shortened

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
