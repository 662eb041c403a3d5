"""Scores that somebody has published: a JSON, YAML or CSV file with the number of items of each score."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import yaml

from lmworks.errors import UserError
from lmworks.evaluate.compare.results import Answers, Results

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
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise UserError(f"{path} has more than {_MOST_BYTES >> 20} MiB, which is no table of scores")
    try:
        text = data.decode("utf-8-sig")
        model, rows = _csv(path, text) if path.suffix == ".csv" else _document(path, text)
    except (ValueError, csv.Error, yaml.YAMLError, RecursionError) as error:
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


def _document(path: Path, text: str) -> tuple[str, dict[str, Any]]:
    found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    scores = found.get("scores") if isinstance(found, dict) else None
    if isinstance(found, dict) and isinstance(found.get("models"), dict):
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
    n = _number(path, name, "n", row["n"])
    if not 1 <= n <= _MOST_ITEMS or n != int(n):
        raise UserError(f"{path}: n of {name} is {row['n']!r}; it is a whole number from 1 to {_MOST_ITEMS:,}")
    if row.get("correct") not in (None, ""):
        correct = _number(path, name, "correct", row["correct"])
        if not 0 <= correct <= n or correct != int(correct):
            raise UserError(f"{path}: correct of {name} is {row['correct']!r}; it is a whole number from 0 to n")
        return int(n), int(correct)
    score = _number(path, name, "score", row.get("score"))
    if not 0 <= score <= 1:
        raise UserError(f"{path}: score of {name} is {row.get('score')!r}; write a share from 0 to 1, such as 0.62, or 62%")
    return int(n), round(score * n)


def _number(path: Path, name: str, key: str, value: Any) -> float:
    text = str(value).strip()
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except (ValueError, OverflowError):
        found = math.nan
    if isinstance(value, bool) or not math.isfinite(found):
        raise UserError(f"{path}: {key} of {name} is {value!r}, which is no number; {_FORM}")
    return found
