"""The forms in which preferences are published, converted to messages: one row of a file at a time.

| form       | columns                                                                                                     |
|------------|-------------------------------------------------------------------------------------------------------------|
| explicit   | `prompt`, `chosen`, `rejected`: texts or lists of messages                                                  |
| implicit   | `chosen`, `rejected`: two conversations that differ in the last answer only                                 |
| openai     | `input` with `messages`, `preferred_output`, `non_preferred_output`                                         |
| labeled    | `prompt`, `completion` and `label`, true for a good answer; for loss kto                                    |

`tools` may stand in the row, or in `input`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.corpus.readers.listing import working_directory_hint
from lmworks.errors import UserError

Messages = list[dict[str, Any]]


class NoPreference(ValueError):
    """A row that states no preference. The text is a reason that is counted, and after a colon the detail of this row."""


@dataclass(frozen=True)
class Preference:
    """A prompt and its answers: a chosen and a rejected one, or a single one with a `label`."""

    origin: str
    prompt: Messages
    answers: tuple[dict[str, Any], ...]
    tools: Any = None
    label: bool | None = None

    def conversation(self, answer: dict[str, Any]) -> Messages:
        """The prompt with an answer at its end."""
        return [*self.prompt, answer]


def convert(row: Any, origin: str, labeled: bool) -> Preference:
    """A row as a preference, or as a labeled answer. Raises `NoPreference`."""
    if not isinstance(row, dict):
        raise NoPreference(f"no object with columns: {type(row).__name__}")
    if labeled and "completion" in row:
        return _labeled(row, origin)
    if {"input", "preferred_output", "non_preferred_output"} <= row.keys():
        given = row["input"] if isinstance(row["input"], dict) else {}
        prompt, chosen, rejected = given.get("messages"), row["preferred_output"], row["non_preferred_output"]
        row = given | row
    elif {"chosen", "rejected"} <= row.keys():
        prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    else:
        wanted = "prompt, completion and label" if labeled else "prompt, chosen and rejected"
        raise NoPreference(f"no known form: its columns are {', '.join(map(str, row)) or 'none'}, not {wanted}")
    first, second = (_parts(prompt, answer, origin) for answer in (chosen, rejected))
    if first[0] != second[0]:
        raise NoPreference("different prompts: the two conversations differ before the last answer")
    return Preference(origin, first[0], (first[1], second[1]), row.get("tools"))


def _labeled(row: dict[str, Any], origin: str) -> Preference:
    if not isinstance(row.get("label"), bool):
        raise NoPreference(f"no label: label is {row.get('label')!r}, not true or false")
    prompt, answer = _parts(row.get("prompt"), row["completion"], origin)
    return Preference(origin, prompt, (answer,), row.get("tools"), row["label"])


def _parts(prompt: Any, answer: Any, origin: str) -> tuple[Messages, dict[str, Any]]:
    """The messages before the last answer, and the answer."""
    before = _messages(prompt, "user")
    whole = [*before, *_messages(answer, "assistant")]
    if len(whole) < 2 or whole[-1].get("role") != "assistant":
        raise NoPreference("no prompt with an answer: the last message is not the assistant's answer to another")
    if not _said(whole[-1]):
        raise NoPreference("empty answer")
    return whole[:-1], whole[-1]


def _messages(value: Any, role: str) -> Messages:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise NoPreference(f"malformed: {type(value).__name__} is neither text nor messages")
    return value


def _said(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content) or bool(message.get("tool_calls"))


def read_jsonl(where: str, given: str | None) -> Iterator[tuple[str, Any]]:
    """Each line of a file, or of the *.jsonl of a folder, with its origin: its value, or a `NoPreference` that says why it has none.

    `where` is the recipe key of the data set. Raises `UserError` if there is no such file.
    """
    if not given:
        raise UserError(f"{where}: kind jsonl needs path, a file or a directory of *.jsonl files")
    path = Path(given)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise UserError(f"{where}.path: {path} is no file and no directory with *.jsonl files{working_directory_hint(given)}")
    for file in files:
        with open(file, "rb") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    yield f"{file}:{number}", _value(line)


def _value(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return NoPreference(f"bad UTF-8: {error}")
    except (ValueError, RecursionError) as error:
        return NoPreference(f"broken JSON: {error}")
