"""The forms in which prompts of reinforcement learning are published, converted to messages: one row of a file at a time.

A prompt is a column with a question (`ASKED`), text or messages, or `messages`/`conversations` (TRL's prompt-only, verl, OpenAI). Messages
that end with an answer lose it, and it is the row's `answer` if the row states none. Answers may stand in other columns (`_ANSWERS`, the
first that the row has), and for verl in `reward_model.ground_truth`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmworks.recipe.schema.tuning_set import TuningSet
from lmworks.tokenizer.messages import Message
from lmworks.train.data.row_columns import (
    NoRow,
    asked_in,
    described_columns,
    first_of,
    history_in,
    list_in,
    messages_of,
    refuse_lone_surrogates,
    refuse_media,
    renamed,
    tools_in,
    with_system,
)

_ANSWERS = ("answer", "final_answer", "ground_truth", "reference_answer", "solution", "label")


@dataclass(frozen=True)
class Asked:
    """A prompt: its `messages` and `tools`, and its `row` for rewards, with `prompt` and, where the row states one, `answer`."""

    origin: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    row: dict[str, Any]
    noted: Counter[str] = field(default_factory=Counter)


def convert(given: Any, origin: str, data: TuningSet | None = None) -> Asked:
    """A row as a prompt. Raises `NoRow`."""
    row = renamed(given, data)
    refuse_media(row)
    turns, noted = list_in(row), Counter[str]()
    asked = None if turns is not None else asked_in(row)
    if turns is None and asked is None:
        raise NoRow(f"no prompt: {described_columns(row, data)}")
    messages = with_system(row, [*history_in(row), *messages_of(turns if turns is not None else asked, "user")], noted)
    answer = _answer_in(row)
    if messages and messages[-1]["role"] == "assistant":
        last = messages.pop()
        answer = last["content"] if answer is None else answer
        noted["with an answer at the end of the prompt, which is taken off"] += 1
    if not any(message["role"] == "user" and not message.empty for message in messages):
        raise NoRow("no prompt: no message of the user")
    found = {str(name): value for name, value in row.items()} | {"prompt": row.get("prompt", asked if asked is not None else turns)}
    if answer is not None:
        found["answer"] = answer
    refuse_lone_surrogates([messages, found])
    return Asked(origin, messages, tools_in(row), found, noted)


def _answer_in(row: Mapping[str, Any]) -> Any:
    name = first_of(row, _ANSWERS)
    if name is not None:
        return row[name]
    model = row.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else None
