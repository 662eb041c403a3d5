"""The answers of one side of a comparison: read from the folder of an evaluation, or from a table that somebody has published.

A published table is a JSON, YAML or CSV file with the number of items of each score.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.io import jsonl
from lmworks.io.files import read_at_most, read_json
from lmworks.recipe.document import parse

KINDS = ("no answer", "format", "truncated", "timeout", "wrong")
"""Kinds of failures, in the order in which they are printed."""


@dataclass(frozen=True)
class Outcome:
    """What became of one item under one score. `mark` is what the item adds to the score: 1 for a correct answer, or a share of it.

    Items of one `passage`, or else of one `subject`, are resampled together. `tokens` is the length of the prompt; `answer` is what the
    model answered, where it is known; `value` is the bits per byte of the right answer in cloze form. `asked` is a hash of what the item
    asks; records of earlier versions have none.
    """

    id: str
    mark: float
    subject: str = ""
    passage: str = ""
    failure: str | None = None
    tokens: int = 0
    value: float | None = None
    answer: str = ""
    asked: str = ""


@dataclass(frozen=True)
class Answers:
    """One score of a model: `items` by id, or None if it is a published figure. `examples` identifies the worked examples; `sampling` says
    how replies were drawn, empty if greedily."""

    name: str
    set: str
    n: int
    score: float
    items: dict[str, Outcome] | None = None
    examples: str = ""
    sampling: str = ""


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
        drawn = [f"{key} {described[score][key]}" for key in ("temperature", "top_p") if key in described.get(score, {})]
        scores[score] = Answers(score, sets[score], len(items), mean, items, fingerprint, ", ".join(drawn))
    documents = {
        one["document"]: Document(one["domain"], max(1, int(_number(one.get("bytes")))), _number(one.get("bits")))
        for one in _records(folder / f"documents-{name}.jsonl", ("document", "domain"))
    }
    questions = {
        (one["set"], one["id"]): (one["question"], one["answer"])
        for one in _records(folder / "questions.jsonl", ("set", "id", "question", "answer"))
    }
    notes = [
        f"{cut:,} of {answers.n:,} items of {name} were longer than the context of the model, and lost their beginnings"
        for name, answers in scores.items()
        if described.get(name, {}).get("form") in ("cloze", "letters") and (cut := int(_number(described[name].get("truncated"))))
    ]
    return Results(label, str(folder), scores, documents, questions, notes)


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
        str(one.get("asked") or ""),
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else 0.0


SUFFIXES = (".json", ".yaml", ".yml", ".csv")
_MOST_BYTES = 16 << 20
_MOST_ITEMS = 10_000_000
_FORM = (
    "write {model: NAME, scores: {SCORE: {score: 0.62, n: 1000}}}, or CSV with the columns name, score and n; "
    "`correct` may stand in place of `score`"
)


def read_table(path: Path) -> Results:
    """The scores of a file. Raises `UserError` if it is not of this form."""
    with open(path, "rb") as file:
        data = read_at_most(file, _MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise UserError(f"{path} has more than {_MOST_BYTES >> 20} MiB, which is no table of scores")
    try:
        text = data.decode("utf-8-sig")
        model, rows = _csv(path, text) if path.suffix == ".csv" else _published_document(path, text)
    except (ValueError, csv.Error, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is no table of scores ({' '.join(str(error).split())[:120]}); {_FORM}") from None
    if not rows:
        raise UserError(f"{path} has no scores; {_FORM}")
    scores = {}
    for name, row in rows.items():
        n, correct = _counts(path, name, row)
        scores[name] = Answers(name, name.split("/")[0], n, correct / n)
    return Results(model, str(path), scores, published=True)


def _published_document(path: Path, text: str) -> tuple[str, dict[str, Any]]:
    try:
        found = parse(text, str(path)).tree
    except UserError as error:
        raise ValueError(str(error).removeprefix(f"{path}:")) from None
    scores = found.get("scores")
    if isinstance(found.get("models"), dict):
        raise UserError(f"{path} is the results.json of an evaluation, whose items lie beside it; give its folder: {path.parent}")
    if not isinstance(scores, dict) or not all(isinstance(name, str) for name in scores):
        raise UserError(f"{path} has no mapping `scores`; {_FORM}")
    return str(found.get("model") or path.stem), scores


def _csv(path: Path, text: str) -> tuple[str, dict[str, Any]]:
    rows: dict[str, Any] = {}
    for row in csv.DictReader(io.StringIO(text)):
        name = row.get("name")
        if not name:
            raise UserError(f"{path} has a row without a name; {_FORM}")
        if name in rows:
            raise UserError(f"{path} has {name} twice; keep one of them")
        rows[name] = row
    return path.stem, rows


def _counts(path: Path, name: str, row: Any) -> tuple[int, int]:
    """Items, and those that were right."""
    if not isinstance(row, dict) or row.get("n") in (None, ""):
        raise UserError(f"{path}: {name} has no n (the number of items), without which its interval is not known; {_FORM}")
    n = _published_number(path, name, "n", row["n"])
    if not 1 <= n <= _MOST_ITEMS or n != int(n):
        raise UserError(f"{path}: n of {name} is {row['n']!r}; it is a whole number from 1 to {_MOST_ITEMS:,}")
    if row.get("correct") not in (None, ""):
        correct = _published_number(path, name, "correct", row["correct"])
        if not 0 <= correct <= n or correct != int(correct):
            raise UserError(f"{path}: correct of {name} is {row['correct']!r}; it is a whole number from 0 to n")
        return int(n), int(correct)
    score = _published_number(path, name, "score", row.get("score"))
    if not 0 <= score <= 1:
        raise UserError(f"{path}: score of {name} is {row.get('score')!r}; write a share from 0 to 1, such as 0.62, or 62%")
    return int(n), round(score * n)


def _published_number(path: Path, name: str, key: str, value: Any) -> float:
    text = str(value).strip()
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except (ValueError, OverflowError):
        found = math.nan
    if isinstance(value, bool) or not math.isfinite(found):
        raise UserError(f"{path}: {key} of {name} is {value!r}, which is no number; {_FORM}")
    return found
