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

from dataclasses import dataclass
from typing import Any

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
