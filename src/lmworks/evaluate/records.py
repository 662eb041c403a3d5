"""The records of an evaluation, one line each, from which models are compared.

    items-NAME.jsonl       the items that failed and succeeded most clearly, with their log-likelihoods and replies
    outcomes-NAME.jsonl    one line per item and score: whether it was correct, why not, what was answered
    documents-NAME.jsonl   one line per held-out document: its bits and bytes
    questions.jsonl        question and right answer of every item that was asked
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks import files, jsonl
from lmworks.evaluate.items import shortened

if TYPE_CHECKING:
    from lmworks.evaluate.found import Found

_MOST_TEXT = 2000  # characters of a question; what is longer loses its middle


def write_records(out_dir: Path, name: str, found: Found, add: bool = False) -> None:
    """Write the records of model `name` into `out_dir`. With `add`, questions that other models were asked are kept."""
    files.write_text(out_dir / f"items-{name}.jsonl", _lines(found.items))
    files.write_text(out_dir / f"outcomes-{name}.jsonl", _lines(found.outcomes))
    files.write_text(out_dir / f"documents-{name}.jsonl", _lines(asdict(one) for one in found.documents))
    path = out_dir / "questions.jsonl"
    asked = {(one["set"], one["id"]): one for one in (jsonl.read(path) if add else ())}
    for name_of_set, questions in found.asked.items():
        for one in questions:
            item = one.name.removeprefix(f"{name_of_set}/")
            asked[name_of_set, item] = {"set": name_of_set, "id": item, "question": shortened(one.text, _MOST_TEXT),
                                        "answer": shortened(one.answer, _MOST_TEXT)}  # fmt: skip
    files.write_text(path, _lines(asked.values()))


def _lines(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
