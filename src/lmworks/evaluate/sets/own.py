"""The items of a task of the user's own, from its data file and the YAML file that says what the columns mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lmworks.errors import UserError
from lmworks.evaluate.items import LETTERS, Item, OpenItem, Row
from lmworks.evaluate.sets.choice_set import ANSWER, Asked, item
from lmworks.evaluate.sources import local
from lmworks.recipe.loading.own_task import data_path
from lmworks.recipe.schema.own_task import OwnTask

_FIELD = re.compile(r"\{([^{}]+)\}")


def items(name: str, path: str, task: OwnTask, examples: bool = False) -> Iterator[Item]:
    """The items of the task, or its worked examples. Raises `UserError` that names the file and the row."""
    data = data_path(path, (task.examples if examples else task.file) or "")
    seen: set[str] = set()
    for number, row in local.rows(data):
        try:
            made = _item(name, task, number, row)
        except KeyError as error:
            columns = ", ".join(sorted(map(str, row))[:20])
            raise UserError(f"the task {path}: row {number} of {data} has no column {error}; it has: {columns}") from None
        except (ValueError, TypeError, IndexError) as error:
            raise UserError(f"the task {path}: row {number} of {data}: {error}") from None
        if made.id in seen:
            raise UserError(f"the task {path}: two rows of {data} have the id {made.id!r}; set id to a column that tells them apart")
        seen.add(made.id)
        yield made


def _item(name: str, task: OwnTask, number: str, row: Row) -> Item:
    question = _text(task.question, row)
    key = str(row[task.id]) if task.id else number
    subject = str(row[task.subject]) if task.subject else ""
    context = task.prompt.replace("{question}", question)
    shown, answer = context.removesuffix(ANSWER), row[task.answer]
    if task.choices is None:
        accepted = tuple(map(str, answer if isinstance(answer, list) else [answer]))
        if not accepted or not all(one.strip() for one in accepted):
            raise ValueError(f"{task.answer} is empty")
        return OpenItem(name, key, subject, shown, accepted, task.metric, f"{question} {accepted[0]}")
    choices = row[task.choices] if isinstance(task.choices, str) else [row[column] for column in task.choices]
    if not isinstance(choices, list):
        raise ValueError(f"{task.choices} is no list; name one column per choice instead: choices: [a, b]")
    texts = tuple(str(choice) for choice in choices)
    return item(name, Asked(key, question, texts, _index(answer, texts), subject), shown, context, question)


def _text(template: str, row: Row) -> str:
    """The value of a column, or a template filled with the row's values; nothing in it is evaluated."""
    return _FIELD.sub(lambda found: str(row[found[1]]), template) if "{" in template else str(row[template])


def _index(answer: Any, choices: tuple[str, ...]) -> int:
    """The index of the right choice, given as its text, its letter or its index."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer
    text = str(answer).strip()
    if text in choices:
        return choices.index(text)
    if text.upper() in tuple(LETTERS[: len(choices)]):
        return LETTERS.index(text.upper())
    if text.isdecimal():
        return int(text)
    raise ValueError(f"the answer {text[:50]!r} is no choice, no letter and no index of one")
