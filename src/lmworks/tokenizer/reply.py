"""Parsing replies of the assistant into reasoning, answer, and tool calls in OpenAI's form: the inverse of the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_THINK, _THOUGHT, _CALL, _CALLED = "<think>", "</think>", "<tool_call>", "</tool_call>"
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


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
    let the model decide whether to think.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None, thinking: bool = True) -> None:
        self._types = dict(map(_types, tools or ()))
        self._held = self._gap = ""
        self._state = "start" if thinking else "content"
        self._trim = not thinking  # markup has just ended: the newline after it is not content

    def push(self, text: str) -> Reply:
        """The parts that `text` completes."""
        self._held += text
        return self._read(last=False)

    def finish(self) -> Reply:
        """End of the text: returns what was held back."""
        return self._read(last=True)

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
            self._state = "content"

    def _thoughts(self, reply: Reply, last: bool) -> None:
        thought, closed, rest = self._held.partition(_THOUGHT)
        if closed:
            reply.reasoning += thought
            self._held, self._state, self._trim = rest, "content", True
        else:
            keep = 0 if last else _partial_match(self._held, _THOUGHT)
            reply.reasoning += self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]

    def _content(self, reply: Reply, last: bool) -> None:
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
        text, opened, rest = self._held.partition(_CALL) if self._types else (self._held, "", "")
        if opened:
            reply.content += text.rstrip()
            self._gap = text[len(text.rstrip()) :]
            self._held, self._state = rest, "call"
            return
        keep = _partial_match(text, _CALL) if self._types and not last else 0
        if self._types and not last:  # white space before a call is not content, and a call may follow
            keep = len(text) - len(text[: len(text) - keep].rstrip())
        reply.content += text[: len(text) - keep]
        self._held = text[len(text) - keep :]

    def _call(self, reply: Reply, last: bool) -> None:
        body, closed, rest = self._held.partition(_CALLED)
        if not closed and not last:
            return
        call = _parse(body, self._types) if closed else None
        if call is None:
            reply.content += self._gap + _CALL + body + closed
        else:
            reply.calls.append(call)
        self._held, self._state, self._trim = rest, "content", call is not None


def read(text: str, tools: Sequence[Mapping[str, Any]] | None = None, thinking: bool = True) -> Reply:
    """The parts of a whole reply."""
    reader = ReplyReader(tools, thinking)
    first, rest = reader.push(text), reader.finish()
    return Reply(first.reasoning + rest.reasoning, first.content + rest.content, first.calls + rest.calls)


def _partial_match(text: str, mark: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `mark`."""
    return next(size for size in range(min(len(mark) - 1, len(text)), -1, -1) if text.endswith(mark[:size]))


def _types(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    function = tool.get("function", tool)
    properties = (function.get("parameters") or {}).get("properties") or {}
    return str(function.get("name")), {key: value.get("type") for key, value in properties.items() if isinstance(value, dict)}


def _parse(body: str, types: Mapping[str, Mapping[str, Any]]) -> ToolCall | None:
    """A name, then pairs of <arg_key> and <arg_value>, as GLM-4.x writes it; or an object with name and arguments, as Qwen and Hermes write
    it. None if the format differs or the tool was not offered.
    """
    if body.lstrip().startswith("{"):
        return _parse_object(body, types)
    name, _, rest = body.partition("<arg_key>")
    name = name.strip()
    if name not in types:
        return None
    rest = body[body.index(name) + len(name) :]
    if _ARGUMENT.sub("", rest).strip():
        return None
    arguments = {key: _value(value, types[name].get(key)) for key, value in _ARGUMENT.findall(rest)}
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _parse_object(body: str, types: Mapping[str, Mapping[str, Any]]) -> ToolCall | None:
    try:
        call = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call.get("name"), str) or call["name"] not in types or not isinstance(arguments := call.get("arguments", {}), dict):
        return None
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))


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
