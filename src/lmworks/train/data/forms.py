"""The forms in which conversations and prompts are published, converted to messages: one row of a file or table at a time.

| form       | columns                                                                                                            |
|------------|--------------------------------------------------------------------------------------------------------------------|
| messages   | `messages`, `conversations` or `conversation`, a list of {role, content, ...}, of texts in turn (LIMA) or of       |
|            | {input, output} (Capybara); `system`, `tools` (OpenAI)                                                             |
| sharegpt   | the same columns, a list of {from, value, ...}                                                                     |
| alpaca     | `instruction` with `output` or `response`; `input` and `context` below it; `system`; `history`, a list of          |
|            | [question, answer]                                                                                                 |
| completion | a question (`ASKED`) and an answer (`SAID`), texts or messages; `input` and `context` below a text; `system`,      |
|            | `tools`, beside which `answers` are calls (xLAM). Of messages, only those of the answer are trained                |
| segments   | `segments`, a list of {text, label}: text without a template, trained where label is true (axolotl)                |
| text       | `text`: a document, trained as a whole, and ended                                                                  |

A prompt of reinforcement learning is a column with a question (`ASKED`), text or messages, or `messages`/`conversations` (TRL's
prompt-only, verl, OpenAI). Messages that end with an answer lose it, and it is the row's `answer` if the row states none. Answers may stand
in other columns (`_ANSWERS`, the first that the row has), and for verl in `reward_model.ground_truth`.

The messages have all forms of `lmworks.tokenizer.messages`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from lmworks.recipe.schema.tune import ConversationFormat, TuningSet
from lmworks.tokenizer.messages import Message
from lmworks.train.data.row_columns import (
    ASKED,
    SAID,
    TURNS_IN_TEXT,
    NoRow,
    Row,
    answer_to,
    asked_columns,
    asked_in,
    described_columns,
    first_of,
    flag,
    history_in,
    is_dialogue,
    is_named,
    list_in,
    messages_of,
    note_unused,
    refuse_lone_surrogates,
    refuse_media,
    renamed,
    said_by,
    tools_in,
    with_system,
    with_values,
)

_NO_CONVERSATIONS = {"chosen": "preference pairs, for dpo.data", "rejected": "preference pairs, for dpo.data",
                     "completions": "answers in steps (TRL's stepwise supervision), for which there is no loss",
                     "role": "single messages, as of a tree (OpenAssistant): a row is a whole conversation"}  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """A row in our form: `messages` and `tools` as `Tokenizer.encode_chat` takes them; or `segments`, texts without a template, each with
    whether it is trained. `form` is the form that it came in, `noted` counts what is to be told of it."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    form: str
    segments: tuple[tuple[str, bool], ...] = ()
    noted: Counter[str] = field(default_factory=Counter)


def convert_conversation(given: Any, form: ConversationFormat = "auto", data: TuningSet | None = None) -> Conversation:
    """A row as a conversation. `form` "auto" is the first form whose columns the row has. Raises `NoRow`."""
    row = with_values(renamed(given, data))
    found = detect(row) if form == "auto" else form
    if found is None or not _HAS[found](row):
        wanted = "no known form" if form == "auto" else f"not of the form {form}"
        other = next((f"; these are {what}" for name, what in _NO_CONVERSATIONS.items() if name in row), "")
        raise NoRow(f"{wanted}: {described_columns(row, data)}{other}")
    refuse_media(row)
    noted: Counter[str] = Counter()
    if found in _WITHOUT_TEMPLATE:
        segments = _WITHOUT_TEMPLATE[found](row)
        refuse_lone_surrogates(segments)
        note_unused(row, [found], [Message(content=text) for text, _ in segments], noted, answers=True)
        return Conversation([], None, found, segments, noted)
    messages, tools = with_system(row, _CONVERT[found](row, noted), noted), tools_in(row)
    columns = [] if found in _OF_LISTS else [*asked_columns(row), _answer_messages(row)]
    note_unused(row, columns, messages, noted, answers=True)
    refuse_lone_surrogates([messages, tools])
    noted["messages marked to be trained that are no answers"] += sum(message.asked_to_train for message in messages)
    noted["with a label of false, trained all the same"] += row.get("label") is False or flag(row.get("kto_tag")) is False
    noted["answers marked not to be trained"] += sum(not message.learned for message in messages if message["role"] == "assistant")
    return Conversation(messages, tools, found, noted=noted)


def detect(row: Row) -> str | None:
    """The form of a row by its columns; None if it has none."""
    return next((form for form, has in _HAS.items() if has(row)), None)


def _from_list(row: Row, noted: Counter[str]) -> list[Message]:
    return messages_of(list_in(row), "user")


def _from_alpaca(row: Row, noted: Counter[str]) -> list[Message]:
    asked = asked_in(row)
    question = messages_of(asked if asked and str(asked).strip() else "", "user")
    return [*history_in(row), *question, *_answer(row, noted)]


def _from_completion(row: Row, noted: Counter[str]) -> list[Message]:
    """The question is all prompt: answers in it are not trained, as in TRL."""
    asked = messages_of(asked_in(row), "user")
    before = [message.having(learned=False) if message["role"] == "assistant" else message for message in asked]
    return [*history_in(row), *before, *_answer(row, noted)]


def _answer_messages(row: Row) -> str | None:
    return first_of(row, ("output", *SAID) if "instruction" in row else SAID)


def _answer(row: Row, noted: Counter[str]) -> list[Message]:
    return said_by("assistant", answer_to(asked_in(row), row[_answer_messages(row) or ""], noted))


def _from_segments(row: Row) -> tuple[tuple[str, bool], ...]:
    found = []
    for one in row["segments"]:
        text, label = (one.get("text"), flag(one.get("label"))) if isinstance(one, Mapping) else (None, None)
        if not isinstance(text, str) or label is None:
            raise NoRow("segments that are no list of text and label")
        found.append((text, label))
    return tuple(found)


def _of_list(row: Row, key: str) -> bool:
    """Whether the row has a list of messages, of which the first has a `key`."""
    found = list_in(row)
    return found is not None and (not found or key in found[0])


_HAS: dict[str, Callable[[Row], bool]] = {
    "messages": lambda row: _of_list(row, "role"),
    "sharegpt": lambda row: _of_list(row, "from"),
    "segments": lambda row: isinstance(row.get("segments"), list),
    "alpaca": lambda row: isinstance(row.get("instruction"), str) and _answer_messages(row) is not None,
    "completion": lambda row: first_of(row, ASKED) is not None and _answer_messages(row) is not None,
    "text": lambda row: isinstance(row.get("text"), str) and not any(name in row for name in (*ASKED, *SAID, "role")),
}
_OF_LISTS = ("messages", "sharegpt")
_CONVERT: dict[str, Callable[[Row, Counter[str]], list[Message]]] = {
    "messages": _from_list, "sharegpt": _from_list, "alpaca": _from_alpaca, "completion": _from_completion,
}  # fmt: skip
_WITHOUT_TEMPLATE: dict[str, Callable[[Row], tuple[tuple[str, bool], ...]]] = {
    "segments": _from_segments, "text": lambda row: ((row["text"], True),)
}  # fmt: skip
assert {"auto", *_HAS} == {"auto", *_CONVERT, *_WITHOUT_TEMPLATE} == set(get_args(ConversationFormat))


_ANSWERS = ("answer", "final_answer", "ground_truth", "reference_answer", "solution", "label")


@dataclass(frozen=True)
class PromptRow:
    """A prompt: its `messages` and `tools`, and its `row` for rewards, with `prompt` and, where the row states one, `answer`."""

    origin: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    row: dict[str, Any]
    noted: Counter[str] = field(default_factory=Counter)


def convert_prompt(given: Any, origin: str, data: TuningSet | None = None) -> PromptRow:
    """A row as a prompt. Raises `NoRow`."""
    columns = renamed(given, data)
    row = with_values(columns)
    refuse_media(row)
    turns, noted = None if any(is_named(row, name) for name in ASKED) else list_in(row), Counter[str]()
    asked = None if turns is not None else asked_in(row)
    if turns is None and asked is None:
        raise NoRow(f"no prompt: {described_columns(row, data)}")
    messages = with_system(row, [*history_in(row), *messages_of(turns if turns is not None else asked, "user")], noted)
    answer = _answer_in(columns)
    note_unused(row, asked_columns(row) if turns is None else [], messages, noted, answers=False)
    noted[TURNS_IN_TEXT] += is_dialogue(asked)
    if messages and messages[-1]["role"] == "assistant":
        last = messages.pop()
        answer = last["content"] if answer is None else answer
        noted["with an answer at the end of the prompt, which is taken off"] += 1
    if not any(message["role"] == "user" and not message.empty for message in messages):
        raise NoRow("no prompt: no message of the user")
    found = {str(name): value for name, value in columns.items()}
    prompt = row["prompt"] if isinstance(row.get("prompt"), str) else asked
    found["prompt"] = prompt if isinstance(prompt, str) else [dict(message) for message in messages]
    if answer is not None:
        found["answer"] = answer
    if (tests := first_of(row, _TESTS)) is not None:
        found["tests"] = row[tests]
    refuse_lone_surrogates([messages, found])
    return PromptRow(origin, messages, tools_in(row), found, noted)


_TESTS = ("tests", "test_list", "test")  # those of MBPP; of HumanEval, KodCode


def _answer_in(row: Mapping[str, Any]) -> Any:
    name = first_of(row, _ANSWERS)
    if name is not None:
        return row[name]
    model = row.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else None
