"""Messages and tools in every form in which conversations are published or sent, as chat templates expect them.

One conversion for tuning, preferences, rewards and the server's requests, so that a model is asked in the form in which it was trained:

| given                                                             | becomes                                                          |
|-------------------------------------------------------------------|------------------------------------------------------------------|
| `from` and `value`, or `role` and `value` (ShareGPT, Pygmalion)   | `role` and `content`                                             |
| other names of roles (human, gpt, developer, observation, ...)    | system, user, assistant, tool                                    |
| `content` as a list of parts of text                              | text, where the template does not take parts                     |
| `reasoning`, `thinking`, or parts of these types                  | `reasoning_content`                                              |
| `function_call` (OpenAI, before 2024), a speaker function_call,   | `tool_calls` with arguments that are objects                     |
| parts of type tool_call (LLaMA-Factory), arguments as JSON text   |                                                                  |
| `refusal`                                                         | `content`                                                        |
| `weight`, `loss_weight`, `train` of a message or part,            | `Message.learned` and `Message.untrained`                        |
| `train_detail` (OpenAI, LLaMA-Factory, axolotl)                   |                                                                  |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lmworks.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
_CALLER = "function_call"  # a speaker whose text is a call, or a list of calls
_ROLE_NAMES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "bot": "assistant", "model": "assistant", "tool": "tool",
    "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool", _CALLER: _CALLER, "tool_call": _CALLER,
}  # fmt: skip
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_WEIGHTS = ("train", "weight", "loss_weight")
DEEPEST = 100
"""How many lists and objects may lie inside each other. Functions that call themselves for each, as templates do, end at about 1,000."""
_TEXT_PARTS = {"text", "input_text", "output_text"}
_THOUGHT_PARTS = {"reasoning", "thinking"}

Span = tuple[int, int]


class Message(dict[str, Any]):
    """A message as templates expect it, with what is to be learned of it.

    learned: whether an answer is trained at all
    untrained: by field (`content`, `reasoning_content`), spans of characters that are not trained
    silent: for an answer without thoughts: an empty block of thoughts belongs to the prompt, as when a model is asked not to think
    asked_to_train: it is no answer, and was marked to be trained
    """

    learned: bool = True
    untrained: Mapping[str, Sequence[Span]] = {}
    silent: bool = False
    asked_to_train: bool = False

    def having(self, **changes: Any) -> Message:
        """A copy with other flags."""
        found = Message(self)
        for name in ("learned", "untrained", "silent", "asked_to_train"):
            setattr(found, name, changes.get(name, getattr(self, name)))
        return found

    def saying(self, **fields: Any) -> Message:
        """A copy with other fields; a field that is None is taken out."""
        found = self.having()
        for name, value in fields.items():
            if value is None:
                found.pop(name, None)
            else:
                found[name] = value
        return found

    @property
    def empty(self) -> bool:
        """Whether it says nothing: no text, no thoughts, no call."""
        content = self.get("content")
        said = content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())
        return not (said.strip() or str(self.get("reasoning_content") or "").strip() or self.get("tool_calls"))


def normal(number: int, given: Any) -> Message:
    """A message in our form; `number`, from 1, is for errors. A `Message` is returned as it is.

    Raises `UserError` that names the message and what is wrong with it.
    """
    if isinstance(given, Message):
        return given
    if not isinstance(given, Mapping):
        raise UserError(f"message {number} is not an object with role and content")
    if too_deep(given):
        raise UserError(f"message {number} is nested deeper than {DEEPEST} levels")
    message = {str(key): value for key, value in given.items() if value is not None}
    role = _role(number, message)
    content = message.pop("content", message.pop("value", None))
    weight = _weight(number, message)
    detail = message.pop("train_detail", None)
    calls = list(_list_of_calls(number, message.pop("tool_calls", None), "tool_calls that are not a list"))
    if "function_call" in message:
        calls.append(message.pop("function_call"))
    if role == _CALLER:
        role, calls, content = "assistant", [*calls, *_calls_in_text(number, content)], ""
    text = _Text(number, role)
    parts = _as_parts(text, content, calls)
    thoughts = _Text(number, role)
    if given := [message.pop(name) for name in _THOUGHTS if name in message]:
        thoughts.add(next(filter(None, given), given[0]))  # some rows have two of these fields, one of them empty
    if text.thoughts:
        thoughts.add(text.thoughts)
    if role == "assistant" and not text.text and isinstance(refusal := message.pop("refusal", None), str):
        text.add(refusal)
    if parts is None and not (text.given or (role == "assistant" and (calls or thoughts.given))):
        raise UserError(f"message {number} ({role}) has no text as content")
    found = Message({"role": role, "content": text.text if parts is None else parts})
    if thoughts.given:
        found["reasoning_content"] = thoughts.text
    if calls:
        found["tool_calls"] = [_tool_call(number, call) for call in calls]
    found.update((key, value) for key, value in message.items() if key != "refusal")
    found.untrained = {
        name: spans
        for name, spans in (("content", [*text.untrained, *_detail(number, detail, text.text)]), ("reasoning_content", thoughts.untrained))
        if spans
    }
    found.learned = weight is not False
    found.asked_to_train = role != "assistant" and weight is True
    return found


def normal_tools(given: Any) -> list[dict[str, Any]] | None:
    """Tools as OpenAI's objects: JSON text is read, and bare functions are put into `function`. None if there are none.

    Raises `UserError`.
    """
    if isinstance(given, str):
        given = read_json(given, "tools that are") if given.strip() else None
    if isinstance(given, Mapping):
        given = [given]
    if not given:
        return None
    if not isinstance(given, list | tuple):
        raise UserError("tools that are no list of functions")
    if too_deep(given):
        raise UserError(f"tools that are nested deeper than {DEEPEST} levels")
    return [_tool(one) for one in given]


def _tool(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        given = read_json(given, "a tool that is")
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError("tools of which one has no function name")
    if isinstance(parameters := function.get("parameters"), str):
        function = {**function, "parameters": read_json(parameters, "parameters of a tool that are")}
    return {**given, "function": dict(function)} if "function" in given else {"type": "function", "function": dict(function)}


def _role(number: int, message: dict[str, Any]) -> str:
    given = message.pop("role", message.pop("from", None))
    role = _ROLE_NAMES.get(given.strip().lower()) if isinstance(given, str) else None
    if role is None:
        raise UserError(f"message {number} has the role {given!r}; the roles are {', '.join(ROLES)}, and their other names "
                        f"{', '.join(sorted(_ROLE_NAMES.keys() - set(ROLES)))}")  # fmt: skip
    return role


def _weight(number: int, given: dict[str, Any]) -> bool | None:
    """Whether a message or part says that it is trained (True) or not (False); it is taken out of `given`."""
    found: bool | None = None
    for name in _WEIGHTS:
        value = given.pop(name, None)
        if value is None:
            continue
        said = str(value).strip().lower() if isinstance(value, str | bool | int | float) else ""
        flag = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}.get(said)
        if flag is None:
            raise UserError(f"message {number} has {name} {value!r}; a part of a weight cannot be trained, only 0 and 1")
        if found is not None and found != flag:
            raise UserError(f"message {number} says both that it is trained and that it is not")
        found = flag
    return found


class _Text:
    """The text of a field that may be a list of parts: its `text`, the spans that are not trained, and the thoughts among the parts."""

    def __init__(self, number: int, role: str) -> None:
        self._number, self._role = number, role
        self.text, self.thoughts, self.given = "", "", False
        self.untrained: list[Span] = []
        self.calls: list[Any] = []

    def add(self, value: Any) -> None:
        if isinstance(value, str):
            self.text, self.given = self.text + value, True
            return
        if not isinstance(value, list | tuple):
            raise UserError(f"message {self._number} ({self._role}) has no text as content")
        self.given = self.given or not value
        for part in value:
            self._add_part(part)

    def _add_part(self, part: Any) -> None:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise UserError(f"message {self._number} ({self._role}) has no text as content")
        part = {key: value for key, value in part.items() if value is not None}
        kind, weight = part.get("type", "text"), _weight(self._number, part)
        given = next((part[key] for key in (kind, "text", "value", "content", "thinking", "reasoning") if key in part), None)
        if (kind in _TEXT_PARTS and isinstance(given, str)) or (kind == "refusal" and self._role == "assistant" and isinstance(given, str)):
            begin = len(self.text)
            self.text, self.given = self.text + given, True
            if weight is False:
                self.untrained.append((begin, len(self.text)))
        elif kind in _THOUGHT_PARTS and self._role == "assistant":
            inner = _Text(self._number, self._role)
            inner.add(given)
            self.thoughts += inner.text
        elif kind == "tool_call" and self._role == "assistant":
            self.calls += _calls_in_text(self._number, given)
        else:
            only = "only text is read" if kind not in _TEXT_PARTS else "it has no text"
            raise UserError(f"message {self._number} ({self._role}) has a part of type {kind!r} as content; {only}")


def _as_parts(text: _Text, content: Any, calls: list[Any]) -> list[dict[str, str]] | None:
    """Read `content` into `text` and `calls`. The results of a tool stay apart, if they are several parts: templates may show each."""
    if content is not None:
        text.add(content)
    calls += text.calls
    if text._role == "tool" and isinstance(content, list | tuple) and len(content) > 1:
        parts = []
        for part in content:
            one = _Text(text._number, "tool")
            one.add([part])
            parts.append({"type": "text", "text": one.text})
        return parts
    return None


def _detail(number: int, given: Any, text: str) -> list[Span]:
    """axolotl's `train_detail`: the characters from `begin_offset` to `end_offset`, both included, and whether they are trained."""
    if given is None:
        return []
    found = []
    for one in given if isinstance(given, list | tuple) else [None]:
        begin, end, train = (one.get(key) for key in ("begin_offset", "end_offset", "train")) if isinstance(one, Mapping) else (None,) * 3
        if type(begin) is not int or type(end) is not int or type(train) is not bool or not 0 <= begin <= end < len(text):
            raise UserError(f"message {number} has a train_detail that is no list of begin_offset, end_offset and train inside its text")
        if not train:
            found.append((begin, end + 1))
    return found


def _list_of_calls(number: int, given: Any, what: str) -> Sequence[Any]:
    if isinstance(given, str):
        given = read_json(given, f"message {number} has tool_calls that are") if given.strip() else None
    if given is not None and not isinstance(given, list | tuple):
        raise UserError(f"message {number} has {what}")
    return given or ()


def _calls_in_text(number: int, value: Any) -> list[Any]:
    found = read_json(value, f"message {number} has a function call that is") if isinstance(value, str) else value
    return list(found) if isinstance(found, list | tuple) else [found]


def _tool_call(number: int, call: Any) -> dict[str, Any]:
    if isinstance(call, str):
        call = read_json(call, f"message {number} has a tool call that is")
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"message {number} has a tool call without a function name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = read_json(arguments, f"message {number} has a tool call whose arguments are")
    if not isinstance(arguments, Mapping):
        raise UserError(f"message {number} has a tool call whose arguments are not an object")
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}} | identity


def too_deep(value: Any) -> bool:
    """Whether more than `DEEPEST` lists and objects lie inside each other."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [inner for one in level if isinstance(one, dict | list | tuple)
                 for inner in (one.values() if isinstance(one, dict) else one)]  # fmt: skip
        if not level:
            return False
    return True


def read_json(text: str, what: str) -> Any:
    """JSON text of a message, a tool or a row. Raises `UserError`: `what` is not JSON, or is nested too deep."""
    try:
        found = json.loads(text)
        deep = too_deep(found)
    except ValueError:  # also for a number with too many digits
        raise UserError(f"{what} not JSON") from None
    except RecursionError:
        found, deep = None, True
    if deep:
        raise UserError(f"{what} nested deeper than {DEEPEST} levels")
    return found
