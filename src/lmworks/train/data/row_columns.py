"""What all forms of rows share: columns under other names, system messages, tools, text as messages."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.schema.tune import TuningSet
from lmworks.tokenizer.messages import Message, normal, normal_tools, read_json

Row = Mapping[str, Any]
ASKED = ("instruction", "prompt", "question", "query", "problem", "input", "message_1", "INSTRUCTION")
"""Columns with a question, the first that a row has. Beside an `instruction`, `prompt` is often its rendering, with the answer."""
SAID = ("completion", "response", "output", "generation", "solution", "answer", "message_2", "RESPONSE")
"""Columns with its answer. Beside a `solution`, `answer` is often only its last number."""
_BELOW = ("input", "context")  # what a question is about
_BESIDE = ("contexts", "passage", "options", "choices", "reasoning", "rationale", "thinking", "thinking_trajectories")
_TARGETS = ("code", "summary", "label", "labels", "target", "targets")  # what a `text` is a question for
CHOSEN, REJECTED = ("chosen", "chosen_response"), ("rejected", "rejected_response")
_SYSTEM = ("system", "system_prompt")
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_LISTS = ("messages", "conversations", "conversation")
_WORD = 20  # characters: a shorter text may be part of another word
_OF_MESSAGES = ("role", "content", "train")
_DIALOGUE = re.compile(r"(?:\A|\n\n)(Human|Assistant):[ \t]*")
TURNS_IN_TEXT = "with turns of Human: and Assistant: in one text, which are read as such"


class Renamed(dict[str, Any]):
    """A row whose columns have our names. `named` are those that its set says: they are no guess, and come before others."""

    named: frozenset[str] = frozenset()


class NoRow(ValueError):
    """A row that cannot be used. The text is a reason that is counted, and after a colon the detail of this row."""


def renamed(row: Any, data: TuningSet | None) -> Row:
    """A row with the names of columns and roles that its set says (`columns`, `roles`), and without NaN, which pandas writes for an empty
    cell. Raises `NoRow`."""
    if not isinstance(row, Mapping):
        raise NoRow(f"no object with columns: {type(row).__name__}")
    row = {name: value for name, value in row.items() if not (isinstance(value, float) and math.isnan(value))}
    if data is None or not (data.columns or data.roles):
        return row
    taken = {theirs for ours, theirs in data.columns.items() if ours not in _OF_MESSAGES}
    found = {name: value for name, value in row.items() if name not in taken}
    found |= {ours: row[theirs] for ours, theirs in data.columns.items() if ours not in _OF_MESSAGES and theirs in row}
    inner = {theirs: ours for ours, theirs in data.columns.items() if ours in _OF_MESSAGES}
    if inner or data.roles:
        found = {name: _renamed_messages(value, inner, data.roles) for name, value in found.items()}
    result = Renamed(found)
    result.named = frozenset(data.columns)
    return result


def _renamed_messages(value: Any, names: Mapping[str, str], roles: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed_messages(one, names, roles) for one in value]
    if not isinstance(value, Mapping) or not ({"role", "from"} | names.keys()) & value.keys():
        return value
    found = {names.get(key, key): item for key, item in value.items()}
    role = found.pop("role", found.pop("from", None))
    return found | {"role": roles.get(role, role) if isinstance(role, str) else role}


def described_columns(row: Row, data: TuningSet | None = None) -> str:
    """The columns of a row, for an error."""
    said = f"its columns are {', '.join(map(str, row)) or 'none'}"
    names = data.columns if data else {}
    missing = [f"{ours}: {theirs}" for ours, theirs in names.items() if ours not in _OF_MESSAGES and ours not in row]
    return said + (f"; columns names {', '.join(missing)}, which this row lacks" if missing else "")


def with_values(row: Row) -> Row:
    """A row in which numbers of a question or an answer are texts, messages that are JSON text in a column of their own are messages, and
    the `answers` beside `tools` are the calls that answer (xLAM)."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys((*ASKED, *SAID, *_BELOW, *CHOSEN, *REJECTED)):
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = str(value)
        elif name not in SAID and isinstance(value, str) and (messages := _messages_in(value)):
            found[name] = messages
    if row.get("answers") and row.get("tools") and first_of(row, SAID) is None:
        found["answer"] = [{"role": "function_call", "content": row["answers"]}]
    if not found:
        return row
    result = Renamed({**row, **found})
    result.named = row.named if isinstance(row, Renamed) else frozenset()
    return result


def _messages_in(text: str) -> list[Any] | None:
    """The messages that a text is in JSON, as in tables whose cells are texts; None for other text."""
    if not re.match(r"\s*\[\s*\{", text):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if all(isinstance(one, dict) and {"role", "from"} & one.keys() for one in found) else None


def list_in(row: Row) -> list[Any] | None:
    """The column with a list of messages; JSON text is read. None if the row has none. Texts alone are those of the user and the assistant
    in turn (LIMA), and so are pairs of `input` and `output` (Capybara)."""
    for name in _LISTS:
        value = row.get(name)
        if isinstance(value, str) and value.lstrip()[:1] == "[":
            value = _json(value, f"{name} that are")
        if isinstance(value, list) and value and all(isinstance(one, Mapping) and one.keys() >= {"input", "output"} for one in value):
            value = [pair[side] for pair in value for side in ("input", "output")]
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(value)]
        if isinstance(value, list) and all(isinstance(one, Mapping) for one in value[:1]):
            return value
    return None


def first_of(row: Row, names: Sequence[str]) -> str | None:
    """The first of some columns that has a value, those that the set names before all others."""
    found = [name for name in names if row.get(name) is not None]
    return next((name for name in found if is_named(row, name)), next(iter(found), None))


def is_named(row: Row, name: str) -> bool:
    """Whether the set of a row says which column this is."""
    return isinstance(row, Renamed) and name in row.named


def asked_columns(row: Row) -> list[str]:
    """The columns with the question of a row: one of `ASKED`, messages before text and text before none, and behind a text what is to stand
    below it."""
    ours = [name for name in ASKED if row.get(name) is not None]
    named = [name for name in ours if is_named(row, name) and name != "input"]
    listed = [name for name in ours if isinstance(row[name], list | Mapping) and row[name]]
    name = next(iter([*named, *listed, *(name for name in ours if str(row[name]).strip()), *ours]), None)
    if name is None or not isinstance(asked := row[name], str):
        return [] if name is None else [name]
    below = [one for one in _BELOW if one != name and isinstance(row.get(one), str) and row[one].strip()]
    return [name, *(one for one in below if row[one] not in asked or (name, one) == ("instruction", "input"))]


def asked_in(row: Row) -> Any:
    """The question of a row with columns for question and answer: text, with `input` and `context` below it, or messages; None without."""
    values = [row[name] for name in asked_columns(row)]
    return "\n".join(filter(None, values)) if values and isinstance(values[0], str) else next(iter(values), None)


def note_unused(row: Row, used: Collection[str | None], messages: Sequence[Message], noted: Counter[str], answers: bool) -> None:
    """Count a row that has more of the question, or with `answers` of the answer, in columns that are not `used`. What `messages` say
    anyway is not meant."""
    said = "\n".join(_texts(messages))
    names = dict.fromkeys((*ASKED, *_BELOW, *_BESIDE, *(SAID if answers else ()), *(_TARGETS if "text" in used else ())))
    found = [name for name in names if name not in used and not all(_says(said, text) for text in _texts(row.get(name)))]
    if found:
        noted["with columns not used: " + ", ".join(found)] += 1


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        yield from filter(None, [str(value).strip()])
    elif isinstance(value, Mapping):
        yield from (text for name, item in value.items() if name not in ("role", "from", "type") for text in _texts(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _texts(item))


def _says(said: str, text: str) -> bool:
    return text in said if len(text) > _WORD else re.search(rf"(?<!\w){re.escape(text)}(?!\w)", said) is not None


def history_in(row: Row) -> list[Message]:
    """The turns before the question: LLaMA-Factory's `history`, a list of [question, answer]."""
    found: list[Message] = []
    given = row.get("history") or []
    for pair in given if isinstance(given, list | tuple) else [None]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise NoRow("history is not a list of [question, answer]")
        found += said_by("user", pair[0]) + said_by("assistant", pair[1])
    return found


def messages_of(value: Any, role: str) -> list[Message]:
    """Text of a role, a message, or messages. Text that is a dialogue of `Human:` and `Assistant:` is its turns. Raises `NoRow`."""
    if value is None:
        return []
    if isinstance(value, str):
        return dialogue(value, whole=role == "assistant") or [Message(role=role, content=value)]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise NoRow(f"malformed: {type(value).__name__} is neither text nor messages")
    try:
        return [normal(number, message) for number, message in enumerate(value, 1)]
    except UserError as error:
        raise NoRow(f"malformed: {error}") from None


def said_by(role: str, value: Any) -> list[Message]:
    """As `messages_of`, but text is one message, whatever it quotes."""
    return [Message(role=role, content=value)] if isinstance(value, str) else messages_of(value, role)


def dialogue(text: str, whole: bool = False) -> list[Message]:
    """The turns of Anthropic's form, `\\n\\nHuman: ...\\n\\nAssistant: ...`; empty for other text. An open last turn is left out. Only a
    `whole` conversation ends with an answer: a question that does only quotes one."""
    marks = list(_DIALOGUE.finditer(text))
    if not marks or text[: marks[0].start()].strip() or marks[0][1] != "Human" or len(marks) < 2:
        return []
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [(roles[mark[1]], text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]
    if not turns[-1][1]:
        turns.pop()
    if turns[-1][0] == "assistant" and not whole:
        return []
    return [Message(role=role, content=said) for role, said in turns]


def is_dialogue(asked: Any) -> bool:
    """Whether a question is text with the turns of a dialogue."""
    return isinstance(asked, str) and bool(dialogue(asked))


def answer_to(asked: Any, said: Any, noted: Counter[str]) -> Any:
    """An answer as a column has it. Behind a dialogue, whose `Assistant:` a space follows, text is without white space around it."""
    noted[TURNS_IN_TEXT] += int(is_dialogue(asked) or (isinstance(said, str) and bool(dialogue(said, whole=True))))
    return said.strip() if isinstance(said, str) and is_dialogue(asked) else said


def with_system(row: Row, messages: list[Message], noted: Counter[str]) -> list[Message]:
    """Messages behind the system prompt that the row has in a column. A system message among them counts more."""
    name = first_of(row, _SYSTEM)
    given = row[name] if name else None
    prompts = said_by("system", given) if isinstance(given, str | list | Mapping) and given else []
    prompts = [one for one in prompts if not one.empty]
    if not prompts:
        return messages
    if any(one["role"] != "system" for one in prompts):
        raise NoRow(f"malformed: {name} has messages that are none of the system")
    if messages and messages[0]["role"] == "system":
        noted["with a system column beside another system message, which is used"] += int(messages[0]["content"] != prompts[0]["content"])
        return messages
    return [*prompts, *messages]


def tools_in(row: Row) -> list[dict[str, Any]] | None:
    """The tools that a row offers. Raises `NoRow`."""
    given = row.get("tools")
    try:
        return normal_tools(given if given is not None else row.get("functions"))
    except UserError as error:
        raise NoRow(str(error)) from None


def refuse_media(row: Row) -> None:
    """Raise `NoRow` for rows with images, sounds or videos: the text alone would ask about what the model does not see."""
    for name in _MEDIA:
        if row.get(name):
            raise NoRow(f"with {name}: only text is read")


def refuse_lone_surrogates(value: Any) -> None:
    """Raise `NoRow` for text that cannot be encoded: JSON can contain half a character."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise NoRow(f"half a character: \\u{ord(error.object[error.start]):04x}, a lone surrogate") from None
    except (ValueError, RecursionError):
        raise NoRow("malformed: it is nested too deep") from None


def flag(value: Any) -> bool | None:
    """A label as true or false; None if it is neither."""
    known: dict[str, bool] = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    return known.get(str(value).strip().lower()) if isinstance(value, bool | int | float | str) else None


def _json(text: str, what: str) -> Any:
    try:
        return read_json(text, what)
    except UserError as error:
        raise NoRow(str(error)) from None
