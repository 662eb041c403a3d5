"""Tasks of the user's own: the rows of a data file become items as the YAML file of the task says.

The answers of a task with choices have one meaning for the whole task: the text of the choice, its letter, or its index. A meaning counts
if it fits all rows. Where several fit and give different keys, `answer_is` has to choose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmworks.errors import UserError
from lmworks.evaluate.sets import sources
from lmworks.evaluate.sets.choice_sets import Asked, item, require_choices
from lmworks.evaluate.sets.items import LETTERS, Item, OpenItem, Row, is_null, text_of
from lmworks.recipe.schema.evaluate import AnswerIs, OwnTask, data_path
from lmworks.verify.numbers import final_number

_FIELD = re.compile(r"\{([^{}]+)\}")
_CUE = re.compile(r"\s*\n.*\Z")  # the last line of a prompt, where it stands below the question
_MEANINGS: dict[AnswerIs, str] = {"text": "choice", "letter": "letter of one", "index": "index of one"}


@dataclass(frozen=True)
class _Read:
    """A row, read. `keys` has the index of the right choice by each meaning that the answer can have."""

    place: str  # row and file, for errors
    id: str
    subject: str
    question: str
    choices: tuple[str, ...] = ()
    answer: str = ""
    keys: dict[AnswerIs, int] | None = None
    accepted: tuple[str, ...] = ()  # of an open question


def task_items(name: str, path: str, task: OwnTask, examples: bool = False) -> Iterator[Item]:
    """The items of the task, or its worked examples. Raises `UserError` that names the file and the row."""
    found = list(_read_rows(path, task, task.file))
    shown = list(_read_rows(path, task, task.examples)) if task.examples else []
    meaning = _meaning(path, task, [*found, *shown]) if task.choices is not None else "text"
    prompt = task.prompt.rstrip()
    below = _CUE.search(prompt.rpartition("{question}")[2])
    cue = below[0] if below else ""
    for one in shown if examples else found:
        context = prompt.replace("{question}", one.question)
        above = context.removesuffix(cue)
        if one.keys is None:
            yield OpenItem(name, one.id, one.subject, above, one.accepted, task.metric, f"{one.question} {one.accepted[0]}", cue=cue)
        else:
            asked = Asked(one.id, one.question, one.choices, one.keys[meaning], one.subject)
            yield item(name, asked, above, context, one.question, cue)


def _read_rows(path: str, task: OwnTask, file: str) -> Iterator[_Read]:
    data = data_path(path, file)
    seen: set[str] = set()
    for number, row in sources.local_rows(data):
        try:
            made = _read_row(task, number, f"row {number} of {data}", row)
        except KeyError as error:
            columns = ", ".join(sorted(map(str, row))[:20])
            raise UserError(f"the task {path}: row {number} of {data} has no column {error}; it has: {columns}") from None
        except (ValueError, TypeError) as error:
            raise UserError(f"the task {path}: row {number} of {data}: {error}") from None
        if made.id in seen:
            raise UserError(f"the task {path}: two rows of {data} have the id {made.id!r}; set id to a column that tells them apart")
        seen.add(made.id)
        yield made


def _read_row(task: OwnTask, number: str, place: str, row: Row) -> _Read:
    question = _filled(task.question, row)
    key = _cell(row, task.id) if task.id else number
    subject = _cell(row, task.subject) if task.subject else ""
    answer = row[task.answer]
    if task.choices is None:
        accepted = tuple(text_of(one, f"column {task.answer}") for one in (answer if isinstance(answer, list) else [answer]))
        if not accepted or not all(one.strip() for one in accepted):
            raise ValueError(f"{task.answer} is empty")
        if task.metric == "number" and not any(map(final_number, accepted)):
            raise ValueError(f"the answer {accepted[0][:50]!r} is no number, so no reply would be right (metric: number)")
        return _Read(place, key, subject, question, accepted=accepted)
    cells = row[task.choices] if isinstance(task.choices, str) else [row[column] for column in task.choices]
    if not isinstance(cells, list):
        raise ValueError(f"{task.choices} is no list; name one column per choice instead: choices: [a, b]")
    there = [index for index, cell in enumerate(cells) if not is_null(cell)]  # null: this question has fewer choices
    choices = tuple(text_of(cells[index], f"choice {index + 1}") for index in there)
    require_choices(choices)
    _require_different(choices)
    text = _cell(row, task.answer).strip()
    keys = {meaning: there.index(at) for meaning, at in _places(answer, text, cells).items() if at in there}
    if not keys:
        raise ValueError(f"the answer {text[:50]!r} is no choice, no letter and no index of one")
    return _Read(place, key, subject, question, choices, text, keys)


def _require_different(choices: Sequence[str]) -> None:
    stripped = [choice.strip() for choice in choices]
    if "" in stripped:
        raise ValueError(f"choice {stripped.index('') + 1} is empty; write its text, or null where the question has fewer choices")
    if twice := next((choice for choice in stripped if stripped.count(choice) > 1), None):
        raise ValueError(f"two choices are {twice[:50]!r}, of which only one would be right; keep one of them")


def _places(answer: Any, text: str, cells: Sequence[Any]) -> dict[AnswerIs, int]:
    """Which of the cells the answer stands for, by each meaning that it can have."""
    found: dict[AnswerIs, int] = {}
    texts = [None if is_null(cell) else text_of(cell, "").strip() for cell in cells]
    if text in texts:
        found["text"] = texts.index(text)
    if len(text) == 1 and text.upper() in LETTERS:
        found["letter"] = LETTERS.index(text.upper())
    if text.isdecimal() or (isinstance(answer, float) and answer.is_integer() and answer >= 0):  # columns with nulls have floats
        found["index"] = int(text) if text.isdecimal() else int(answer)
    return found


def _meaning(path: str, task: OwnTask, rows: Sequence[_Read]) -> AnswerIs:
    """What the answers of all rows are. Raises `UserError` where no meaning fits all of them, or several that differ."""
    keys = [(row, row.keys or {}) for row in rows]
    if task.answer_is is not None:
        if odd := next((row for row, found in keys if task.answer_is not in found), None):
            raise UserError(f"the task {path}: {odd.place}: the answer {odd.answer[:50]!r} is no {_MEANINGS[task.answer_is]} (answer_is)")
        return task.answer_is
    fit = [meaning for meaning in _MEANINGS if all(meaning in found for _, found in keys)]
    if not fit:
        misfits = [(next(row for row, found in keys if meaning not in found), words) for meaning, words in _MEANINGS.items()]
        said = ", ".join(f"{row.answer[:50]!r} of {row.place} is no {words}" for row, words in misfits)
        raise UserError(f"the task {path}: its answers are written in several ways: {said}; write all alike")
    for row, found in keys:
        if len({found[meaning] for meaning in fit}) > 1:
            raise UserError(
                f"the task {path}: {row.place}: the answer {row.answer[:50]!r} is another choice as {' than as '.join(fit)}, and all rows "
                f"can be read as each; say which with answer_is: {'|'.join(fit)}"
            )
    return fit[0]


def _cell(row: Row, column: str) -> str:
    return text_of(row[column], f"column {column}")


def _filled(template: str, row: Row) -> str:
    """The value of a column, or a template filled with the row's values; nothing in it is evaluated."""
    return _FIELD.sub(lambda found: _cell(row, found[1]), template) if "{" in template else _cell(row, template)
