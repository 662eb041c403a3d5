"""Parsing replies of the assistant into reasoning, answer, and tool calls in OpenAI's form: the inverse of the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmworks.tokenizer.special import ARGS, CALL, CALL_END, CALL_ID, KEY, KEY_END, TOOL_CALLS, VALUE, VALUE_END, ToolForm

_THINK, _THOUGHT = "<think>", "</think>"
_ARGUMENT = re.compile(rf"{KEY}(.*?){KEY_END}\s*{VALUE}(.*?){VALUE_END}", re.DOTALL)
_SPACE = re.compile(r"\s*")
_NEXT_OBJECT = re.compile(r"[\s;]*(?=\{)")  # Llama 3 puts "; " between calls

_Types = Mapping[str, Mapping[str, Any]]  # of the parameters of each tool


@dataclass
class ToolCall:
    """A call as the model wrote it; `arguments` is a JSON object as text, as OpenAI sends it."""

    name: str
    arguments: str


@dataclass
class Reply:
    """The parts of a reply, or of a piece of it."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class ReplyReader:
    """Parses a reply incrementally, while it is generated.

    Reasoning is at the beginning, between <think> and </think>; tool calls may be anywhere after it. The concatenated parts do not depend
    on how the text is cut into pieces. Text without such markup is returned unchanged. White space around markup is removed; an incomplete
    or malformed call remains text. `tools` are the tools offered: without any, nothing is parsed as a call. `thinking`: whether the prompt
    let the model decide whether to think. `form` is that of the chat template (`tool_form`); without one that can be read, calls are in
    <tool_call>. Calls of Mistral and Llama have no mark at their end and are returned by `finish`, and so is an answer of Llama that
    begins with "{", because it may be a call without any mark.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]] | None = None, thinking: bool = True, form: ToolForm | None = None
    ) -> None:  # fmt: skip
        self._types = dict(map(_types, tools or ()))
        self._family = form.family if form and form.marks else "hermes"
        self._mark = form.marks[0] if form and form.marks else CALL
        self._held = self._gap = ""
        self._pushed = 0  # characters
        self.reasoning_end = 0
        """Where the reasoning ends in the text so far, with its marks, in characters; 0 without any."""
        self._state = "start" if thinking else "opening"
        self._trim = not thinking  # markup has just ended: the newline after it is not content

    def push(self, text: str) -> Reply:
        """The parts that `text` completes."""
        self._held += text
        self._pushed += len(text)
        return self._read(last=False)

    def finish(self) -> Reply:
        """End of the text: returns what was held back."""
        return self._read(last=True)

    def whole(self, text: str) -> Reply:
        """The parts of a whole reply, as the only text of this reader."""
        first, rest = self.push(text), self.finish()
        return Reply(first.reasoning + rest.reasoning, first.content + rest.content, first.calls + rest.calls)

    def _read(self, last: bool) -> Reply:
        reply, state = Reply(), ""
        while state != self._state:  # a new state may be able to process the remaining text
            state = self._state
            getattr(self, f"_{state}")(reply, last)
        return reply

    def _start(self, reply: Reply, last: bool) -> None:
        begun = self._held.lstrip()
        if begun.startswith(_THINK):
            self._held, self._state = begun[len(_THINK) :], "thoughts"
        elif last or not _THINK.startswith(begun):
            self._state = "opening"

    def _thoughts(self, reply: Reply, last: bool) -> None:
        thought, closed, rest = self._held.partition(_THOUGHT)
        self.reasoning_end = self._pushed - len(rest)
        if closed:
            reply.reasoning += thought
            self._held, self._state, self._trim = rest, "opening", True
        else:
            keep = 0 if last else _partial_match(self._held, _THOUGHT)
            reply.reasoning += self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]

    def _opening(self, reply: Reply, last: bool) -> None:
        begun = self._held.lstrip()
        if begun or last:
            self._state = "bare" if self._family == "llama" and self._types and begun.startswith("{") else "content"

    def _bare(self, reply: Reply, last: bool) -> None:
        """An answer that is nothing but calls, without a mark."""
        if not last:
            return
        calls, end = _llama_calls(self._held, 0, self._types)
        if calls and not self._held[end:].strip():
            reply.calls += calls
            self._held = ""
        self._state = "content"

    def _content(self, reply: Reply, last: bool) -> None:
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
        text, opened, rest = self._held.partition(self._mark) if self._types else (self._held, "", "")
        if opened:
            reply.content += text.rstrip()
            self._gap = text[len(text.rstrip()) :]
            self._held, self._state = rest, "tagged" if self._mark == CALL else "unclosed"
            return
        keep = _partial_match(text, self._mark) if self._types and not last else 0
        if self._types and not last:  # white space before a call is not content, and a call may follow
            keep = len(text) - len(text[: len(text) - keep].rstrip())
        reply.content += text[: len(text) - keep]
        self._held = text[len(text) - keep :]

    def _tagged(self, reply: Reply, last: bool) -> None:
        """A call between <tool_call> and </tool_call>."""
        body, closed, rest = self._held.partition(CALL_END)
        if not closed and not last:
            return
        call = _parse(body, self._types) if closed else None
        if call is None:
            reply.content += self._gap + CALL + body + closed
        else:
            reply.calls.append(call)
        self._held, self._state, self._trim = rest, "content", call is not None

    def _unclosed(self, reply: Reply, last: bool) -> None:
        """Calls behind a mark that nothing closes."""
        if not last:
            return
        read_calls = _mistral_calls if self._family == "mistral" else _llama_calls
        text, at, gap = self._held, 0, self._gap
        content: list[str] = []  # joined at the end: a model that repeats the mark must not cost quadratic time
        while at >= 0:
            calls, end = read_calls(text, at, self._types)
            reply.calls += calls
            following = text.find(self._mark, end)
            part = text[end:following] if following >= 0 else text[end:]
            part = part.lstrip() if calls else gap + self._mark + part
            gap = part[len(part.rstrip()) :] if following >= 0 else ""
            content.append(part[: len(part) - len(gap)])
            at = following + len(self._mark) if following >= 0 else -1
        reply.content += "".join(content)
        self._held, self._state = "", "content"


def read(
    text: str, tools: Sequence[Mapping[str, Any]] | None = None, thinking: bool = True, form: ToolForm | None = None
) -> Reply:  # fmt: skip
    """The parts of a whole reply."""
    return ReplyReader(tools, thinking, form).whole(text)


def _partial_match(text: str, mark: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `mark`."""
    return next(size for size in range(min(len(mark) - 1, len(text)), -1, -1) if text.endswith(mark[:size]))


def _types(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    function = tool.get("function", tool)
    properties = (function.get("parameters") or {}).get("properties") or {}
    return str(function.get("name")), {key: value.get("type") for key, value in properties.items() if isinstance(value, dict)}


def _parse(body: str, types: _Types) -> ToolCall | None:
    """A name, then pairs of <arg_key> and <arg_value>, as GLM-4.x writes it; or an object with name and arguments, as Qwen and Hermes write
    it. None if the format differs or the tool was not offered.
    """
    if body.lstrip().startswith("{"):
        value, end = _json_at(body, 0)
        return _stated({"arguments": {}} | value, types) if isinstance(value, dict) and not body[end:].strip() else None
    name, _, rest = body.partition(KEY)
    name = name.strip()
    if name not in types:
        return None
    rest = body[body.index(name) + len(name) :]
    if _ARGUMENT.sub("", rest).strip():
        return None
    return _call(name, {key: _value(value, types[name].get(key)) for key, value in _ARGUMENT.findall(rest)}, types)


def _mistral_calls(text: str, at: int, types: _Types) -> tuple[list[ToolCall], int]:
    """The calls at a place of a text, and where they end: a list of objects with name and arguments, or, since version 11 of Mistral's
    tokenizers, a name, and its arguments behind [ARGS]. If one of a list is malformed or of another tool, none is a call.
    """
    if text.startswith("[", _skip_space(text, at)):
        value, end = _json_at(text, at)
        calls = [_stated(one, types) for one in value] if isinstance(value, list) else []
    else:
        following = text.find(TOOL_CALLS, at)
        head, args, _ = text[at : following if following >= 0 else len(text)].partition(ARGS)
        value, end = _json_at(text, at + len(head) + len(args))
        calls = [_call(head.partition(CALL_ID)[0].strip(), value, types)] if args else []
    found = [call for call in calls if call is not None]
    return (found, end) if found and len(found) == len(calls) else ([], at)


def _llama_calls(text: str, at: int, types: _Types) -> tuple[list[ToolCall], int]:
    """The calls at a place of a text, and where they end: objects with name and parameters."""
    calls: list[ToolCall] = []
    while begin := _NEXT_OBJECT.match(text, at):
        value, end = _json_at(text, begin.end())
        if (call := _stated(value, types)) is None:
            break
        calls.append(call)
        at = end
    return calls, at


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place of a text, and where it ends; None if there is none."""
    try:
        return _DECODER.raw_decode(text, _skip_space(text, at))
    except (ValueError, RecursionError):
        return None, at


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found
    return found.end()


def _stated(value: Any, types: _Types) -> ToolCall | None:
    """The call that an object states. Llama 3 writes `parameters` for `arguments`."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return _call(value["name"], value.get("arguments", value.get("parameters")), types)


def _call(name: str, arguments: Any, types: _Types) -> ToolCall | None:
    """None if the tool was not offered or the arguments cannot be those of a call."""
    if name not in types or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # 1e999 is read as infinity, which JSON cannot write
        return None
    # UTF-8 has no half of a surrogate pair. Its escape, which the model wrote, is JSON.
    return ToolCall(name, text.encode(errors="backslashreplace").decode())


def _value(text: str, kind: Any) -> Any:
    """Strings are written bare, other values as JSON. The tool's schema tells which; without one, text that parses as JSON is JSON."""
    if kind == "string":
        return text
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
