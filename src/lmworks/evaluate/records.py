"""The results of an evaluation while it measures a model, the records that it writes, and what a model has forgotten of an earlier one.

    items-NAME.jsonl       the items that failed and succeeded most clearly, with their log-likelihoods and replies
    outcomes-NAME.jsonl    one line per item and score: whether it was correct, why not, what was answered
    documents-NAME.jsonl   one line per held-out document: its bits and bytes
    questions.jsonl        question and right answer of every item that was asked

A model has forgotten the held-out text and the scores on which a comparison shows it to be worse.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.corpus.contamination import Question
from lmworks.evaluate.sets.items import shortened
from lmworks.io import files, jsonl
from lmworks.io.run_layout import BASE

if TYPE_CHECKING:
    from lmworks.evaluate.bits_per_byte import DocumentBits  # imports torch


@dataclass
class EvaluationResults:
    """What was measured.

    scores: by name, as in results.json. outcomes: one record per item and score. items: notable items, to be read. asked: the items of
    each set, as they are kept out of training text. unavailable: sets without data, with the reason. documents: the bits of held-out text.
    """

    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    items: list[dict[str, Any]] = field(default_factory=list)
    asked: dict[str, list[Question]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    documents: list[DocumentBits] = field(default_factory=list)

    def add(self, name: str, score: dict[str, Any], outcomes: Sequence[dict[str, Any]], items: Sequence[dict[str, Any]]) -> None:
        self.scores[name] = score
        self.outcomes += ({"score": name, **one} for one in outcomes)
        self.items += ({"score": name, **one} for one in items)


_MOST_TEXT = 2000  # characters of a question; what is longer loses its middle


def write_records(out_dir: Path, name: str, found: EvaluationResults, add: bool = False) -> None:
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


START = "start"
"""The name of the weights of `start_from` in an evaluation, where the run has pretrained them further."""
_KEPT = ("a", "b", "difference", "interval", "adjusted_p", "n", "verdict")


def forgetting(comparison: Mapping[str, Any], model: str, since: str = BASE.model) -> dict[str, Any]:
    """The part of `results.json` that says it, from one of the `comparisons` of `lmworks.evaluate.comparison.compare`.

    `measures` has for each measure the values of `since` (a), the base model or `START`, and of `model` (b), their difference with its 95%
    interval, and the verdict after Holm's correction; `forgotten` names those on which the model is worse;
    `summary` says it in one line.
    """
    measures = {f"bits per byte, {row['domain']}": {key: row[key] for key in _KEPT} for row in comparison["bits_per_byte"]}
    measures |= {row["score"]: {key: row[key] for key in _KEPT} for row in comparison["scores"]}
    worse = [name for name, row in measures.items() if row["verdict"] == "worse"]
    return _with_summary({"model": model, "since": since, "measures": measures, "forgotten": worse})


def not_compared(model: str, reason: str) -> dict[str, Any]:
    """The same where the weights of `start_from` could not be measured."""
    return _with_summary({"model": model, "since": START, "not_compared": reason})


def _with_summary(found: dict[str, Any]) -> dict[str, Any]:
    return found | {"summary": sentence(found)}


def sentence(found: Mapping[str, Any]) -> str:
    """One line for people."""
    since = found["since"]
    earlier = "the weights of start_from" if since == START else f"the {since} model"
    if "not_compared" in found:
        return f"What was forgotten since {earlier} is not known: {found['not_compared']}."
    measures = found["measures"]
    if not measures:
        return "Nothing was measured that the model could have forgotten: add corpus.sources or evaluate.benchmarks."
    worse = [f"{name} {row['difference']:+.3f} [{row['interval'][0]:+.3f}, {row['interval'][1]:+.3f}]"
             for name, row in measures.items() if name in found["forgotten"]]  # fmt: skip
    if worse:
        return f"Forgotten since {earlier} ({found['model']} minus {since}, 95% interval): {'; '.join(worse)}."
    name, row = next(iter(measures.items()))
    low, high = row["interval"]
    others = f" and {len(measures) - 1} more measures" if len(measures) > 1 else ""
    which = f" since {earlier}" if since == START else ""
    return f"Nothing is shown to be forgotten{which}: {name} {row['difference']:+.3f} [{low:+.3f}, {high:+.3f}]{others}."
