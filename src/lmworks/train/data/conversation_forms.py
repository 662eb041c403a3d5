"""The forms in which conversations are published, converted to messages: one row of a file or table at a time.

| form       | columns                                                                                                    |
|------------|------------------------------------------------------------------------------------------------------------|
| messages   | `messages` (or `conversations`), a list of {role, content, tool_calls, reasoning_content}; `tools` (OpenAI) |
| sharegpt   | `conversations`, a list of {from, value}; `system` and `tools`                                             |
| alpaca     | `instruction` and `output`; `input`, `system` and `history`, a list of [question, answer]                  |
| completion | `prompt` and `completion`, both texts or both lists of messages; `tools`                                   |

`tools` and the arguments of tool calls may be JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from lmworks.recipe.schema.tune import ConversationFormat

_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "bot": "assistant", "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool", "function_call": "function_call",
}  # fmt: skip
_ROLES = {"developer": "system", "function": "tool"}  # other names of our roles


class NoConversation(ValueError):
    """A row that is no conversation. The text is a reason that is counted, and after a colon the detail of this row."""


@dataclass(frozen=True)
class Conversation:
    """Messages and tools as `Tokenizer.encode_chat` takes them, and the form that they came in."""

    messages: list[Any]
    tools: Any
    form: str


def convert(row: Any, form: ConversationFormat = "auto") -> Conversation:
    """A row as a conversation. `form` "auto" is the first form whose columns the row has. Raises `NoConversation`.

    What the messages contain is checked later, by the tokenizer (`lmworks.tokenizer.chat.checked`).
    """
    if not isinstance(row, Mapping):
        raise NoConversation(f"no object with columns: {type(row).__name__}")
    found = detect(row) if form == "auto" else form
    if found is None or not _HAS[found](row):
        wanted = "no known form" if form == "auto" else f"not of the form {form}"
        raise NoConversation(f"{wanted}: its columns are {', '.join(map(str, row)) or 'none'}")
    messages, tools = _CONVERT[found](row)
    return Conversation([_as_message(message) for message in messages], tools, found)


def detect(row: Mapping[str, Any]) -> str | None:
    """The form of a row by its columns; None if it has none."""
    return next((form for form, has in _HAS.items() if has(row)), None)


def _list_of(row: Mapping[str, Any], names: tuple[str, ...], key: str) -> list[Any] | None:
    """The first of the columns that is a list of messages; `key` is what each message has."""
    for name in names:
        value = row.get(name)
        if isinstance(value, list) and (not value or (isinstance(value[0], Mapping) and key in value[0])):
            return value
    return None


def _messages_of(row: Mapping[str, Any]) -> list[Any] | None:
    value = row.get("messages")
    return value if isinstance(value, list) and not _list_of(row, ("messages",), "from") else _list_of(row, ("conversations",), "role")


def _from_messages(row: Mapping[str, Any]) -> tuple[list[Any], Any]:
    return list(_messages_of(row) or []), _tools(row)


def _from_sharegpt(row: Mapping[str, Any]) -> tuple[list[Any], Any]:
    messages = _system(row)
    for turn in _list_of(row, ("conversations", "messages"), "from") or []:
        speaker = turn.get("from") if isinstance(turn, Mapping) else None
        role, value = _SPEAKERS.get(str(speaker).lower()), turn.get("value") if isinstance(turn, Mapping) else None
        if role is None:
            raise NoConversation(f"an unknown speaker: {speaker!r}; known are {', '.join(sorted(_SPEAKERS))}")
        if role == "function_call":
            messages.append({"role": "assistant", "content": None, "tool_calls": _calls(value)})
        else:
            messages.append({"role": role, "content": value})
    return messages, _tools(row)


def _from_alpaca(row: Mapping[str, Any]) -> tuple[list[Any], Any]:
    messages = _system(row)
    for pair in row.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise NoConversation("history is not a list of [question, answer]")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    asked = [text for name in ("instruction", "input") if isinstance(text := row.get(name), str) and text.strip()]
    messages += [{"role": "user", "content": "\n\n".join(asked)}, {"role": "assistant", "content": row["output"]}]
    return messages, _tools(row)


def _from_completion(row: Mapping[str, Any]) -> tuple[list[Any], Any]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [*_system(row), {"role": "user", "content": prompt}, {"role": "assistant", "content": completion}], _tools(row)
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion], _tools(row)
    raise NoConversation("prompt and completion are neither two texts nor two lists of messages")


_HAS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "messages": lambda row: _messages_of(row) is not None,
    "sharegpt": lambda row: bool(_list_of(row, ("conversations", "messages"), "from")),
    "alpaca": lambda row: isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str),
    "completion": lambda row: row.get("prompt") is not None and row.get("completion") is not None,
}
_CONVERT = {"messages": _from_messages, "sharegpt": _from_sharegpt, "alpaca": _from_alpaca, "completion": _from_completion}
assert {"auto", *_HAS} == {"auto", *_CONVERT} == set(get_args(ConversationFormat))


def _system(row: Mapping[str, Any]) -> list[Any]:
    text = row.get("system")
    return [{"role": "system", "content": text}] if isinstance(text, str) and text.strip() else []


def _as_message(message: Any) -> Any:
    """A message without its empty columns, which tables have, and with our names of roles and thoughts."""
    if not isinstance(message, Mapping):
        return message
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if kept.get("role") == "assistant" and kept.get("weight") == 0:
        raise NoConversation("an answer with weight 0: give each answer that is to be learned a conversation of its own")
    if isinstance(role := kept.get("role"), str):
        kept["role"] = _ROLES.get(role, role)
    if "reasoning" in kept and "reasoning_content" not in kept:
        kept["reasoning_content"] = kept.pop("reasoning")
    return kept


def _tools(row: Mapping[str, Any]) -> Any:
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _json(tools, "tools that are") if tools.strip() else None
    return tools or None


def _calls(value: Any) -> list[Any]:
    found = _json(value, "a function call that is") if isinstance(value, str) else value
    return found if isinstance(found, list) else [found]


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NoConversation(f"{what} not JSON") from None
