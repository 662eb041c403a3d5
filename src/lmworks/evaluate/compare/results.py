"""What one side of a comparison has answered: read from the folder of an evaluation, or from a published table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmworks import jsonl
from lmworks.errors import UserError
from lmworks.files import read_json

KINDS = ("no answer", "format", "truncated", "timeout", "wrong")
"""Kinds of failures, in the order in which they are printed."""


@dataclass(frozen=True)
class Outcome:
    """What became of one item under one score. `mark` is what the item adds to the score: 1 for a correct answer, or a share of it.

    Items of one `passage`, or else of one `subject`, are resampled together. `tokens` is the length of the prompt; `answer` is what the
    model answered, where it is known; `value` is the bits per byte of the right answer in cloze form.
    """

    id: str
    mark: float
    subject: str = ""
    passage: str = ""
    failure: str | None = None
    tokens: int = 0
    value: float | None = None
    answer: str = ""


@dataclass(frozen=True)
class Answers:
    """One score of a model: `items` by id, or None if it is a published figure. `examples` identifies the worked examples."""

    name: str
    set: str
    n: int
    score: float
    items: dict[str, Outcome] | None = None
    examples: str = ""


@dataclass(frozen=True)
class Document:
    """A held-out document: its domain, size in bytes, and the bits that the model needs for it."""

    domain: str
    bytes: int
    bits: float


@dataclass
class Results:
    """All that is known of one model. `questions` has (question, right answer) by set and id; `notes` say what a reader should know."""

    name: str
    origin: str
    scores: dict[str, Answers]
    documents: dict[str, Document] = field(default_factory=dict)
    questions: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    published: bool = False


def read_results(folder: Path, name: str, label: str) -> Results:
    """The results of model `name` in the folder of an evaluation; `label` names it for people. Raises `UserError` for damaged files."""
    described = _scores(folder, name)
    by_score: dict[str, dict[str, Outcome]] = {}
    sets: dict[str, str] = {}
    for one in _records(folder / f"outcomes-{name}.jsonl", ("score", "set", "id")):
        sets[one["score"]] = one["set"]
        by_score.setdefault(one["score"], {})[one["id"]] = _outcome(one)
    scores = {}
    for score, items in by_score.items():
        examples = described.get(score, {}).get("examples")
        fingerprint = str(examples.get("fingerprint", "")) if isinstance(examples, dict) else ""
        mean = math.fsum(one.mark for one in items.values()) / len(items)
        scores[score] = Answers(score, sets[score], len(items), mean, items, fingerprint)
    documents = {
        one["document"]: Document(one["domain"], max(1, int(_number(one.get("bytes")))), _number(one.get("bits")))
        for one in _records(folder / f"documents-{name}.jsonl", ("document", "domain"))
    }
    questions = {
        (one["set"], one["id"]): (one["question"], one["answer"])
        for one in _records(folder / "questions.jsonl", ("set", "id", "question", "answer"))
    }
    return Results(label, str(folder), scores, documents, questions)


def names_in(folder: Path) -> list[str]:
    """The models whose results lie in the folder of an evaluation."""
    models = _document(folder).get("models")
    return [name for name in models if (folder / f"outcomes-{name}.jsonl").is_file()] if isinstance(models, dict) else []


def _document(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    found = read_json(path) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _scores(folder: Path, name: str) -> dict[str, Any]:
    found: Any = _document(folder)
    for key in ("models", name, "scores"):
        found = found.get(key) if isinstance(found, dict) else None
    return {key: value for key, value in found.items() if isinstance(value, dict)} if isinstance(found, dict) else {}


def _records(path: Path, texts: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The records of a file, none if there is no such file; `texts` are keys that each must have, with text."""
    for number, one in enumerate(jsonl.read(path), 1):
        if wrong := next((key for key in texts if not isinstance(one.get(key), str)), None):
            raise UserError(f"{path}: line {number} has no text under {wrong!r}; delete the file and evaluate again")
        yield one


def _outcome(one: dict[str, Any]) -> Outcome:
    failure, value, correct = one.get("failure"), one.get("value"), one.get("correct") is True
    mark = _number(value) if "/generate/" in one["score"] and value is not None else float(correct)
    return Outcome(
        one["id"],
        min(1.0, max(0.0, mark)),
        str(one.get("subject") or ""),
        str(one.get("passage") or ""),
        None if correct else failure if failure in KINDS else "wrong",
        int(_number(one.get("tokens"))),
        float(value) if isinstance(value, int | float) and math.isfinite(value) else None,
        str(one.get("answer") or ""),
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else 0.0
