"""Tool calls in the text of a reply, in the forms of several families, as calls in OpenAI's form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmworks.tokenizer.special import (
    ARGS,
    CALL_ID,
    CALL_SEPARATOR,
    FUNCTION,
    FUNCTION_END,
    KEY,
    KEY_END,
    ONE_CALL,
    ONE_CALL_END,
    PARAMETER,
    PARAMETER_END,
    TOOL_CALLS,
    VALUE,
    VALUE_END,
)

_ARGUMENT = re.compile(rf"{KEY}(.*?){KEY_END}\s*{VALUE}(.*?){VALUE_END}", re.DOTALL)
_CODER = re.compile(rf"{FUNCTION}([^>\n]+)>(.*?)(?:{FUNCTION_END})?", re.DOTALL)
_PARAMETER = re.compile(rf"{PARAMETER}([^>\n]+)>\n?(.*?)\n?{PARAMETER_END}", re.DOTALL)
_ONE_CALL = re.compile(rf"{ONE_CALL}(.*?){ONE_CALL_END}", re.DOTALL)
_CODE = re.compile(r"([^\n]*)\n```json\n(.*)\n```\s*", re.DOTALL)
_SPACE = re.compile(r"\s*")
_NEXT_OBJECT = re.compile(r"[\s;]*(?=\{)")  # Llama 3 puts "; " between calls
_PYTHON = {"True": True, "False": False, "None": None}  # as templates in Python show what JSON writes otherwise

Types = Mapping[str, Mapping[str, Any]]
"""Of the parameters of each tool."""


@dataclass
class ToolCall:
    """A call as the model wrote it; `arguments` is a JSON object as text, as OpenAI sends it."""

    name: str
    arguments: str


def types_of(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    function = tool.get("function", tool)
    properties = (function.get("parameters") or {}).get("properties") or {}
    return str(function.get("name")), {key: value.get("type") for key, value in properties.items() if isinstance(value, dict)}


def tagged_call(body: str, types: Types) -> list[ToolCall]:
    """The call between <tool_call> and </tool_call>: an object with name and arguments, as Qwen and Hermes write it; <function=NAME> with
    <parameter=NAME>, as Qwen3-Coder does; or a name, then pairs of <arg_key> and <arg_value>, as GLM-4.x does. None if the format differs
    or the tool was not offered.
    """
    begun = body.strip()
    if begun.startswith("{"):
        value, end = _json_at(begun, 0)
        found = _stated({"arguments": {}} | value, types) if isinstance(value, dict) and end == len(begun) else None
        return [found] if found else []
    if coder := _CODER.fullmatch(begun):
        name, rest, pairs = coder[1], _PARAMETER.sub("", coder[2]), _PARAMETER.findall(coder[2])
    else:
        name, _, rest = begun.partition(KEY)
        name, rest = name.strip(), begun[len(name.rstrip()) :]
        rest, pairs = _ARGUMENT.sub("", rest), _ARGUMENT.findall(rest)
    if name not in types or rest.strip():
        return []
    found = _call(name, {key: _value(value, types[name].get(key)) for key, value in pairs}, types)
    return [found] if found else []


def deepseek_calls(body: str, types: Types) -> list[ToolCall]:
    """The calls behind DeepSeek's mark of calls: each a name, and JSON arguments; V3 and R1 write a type before the name, and the arguments
    in a block of code. If one is malformed or of another tool, none is a call.
    """
    calls: list[ToolCall | None] = []
    for head, separator, rest in (one.partition(CALL_SEPARATOR) for one in _ONE_CALL.findall(body)):
        block = _CODE.fullmatch(rest)
        name, arguments = (block[1], block[2]) if block else (head, rest)
        value, end = _json_at(arguments, 0)
        calls.append(_call(name.strip(), value, types) if separator and not arguments[end:].strip() else None)
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) and not _ONE_CALL.sub("", body).strip() else []


def json_call(name: str, body: str, types: Types) -> ToolCall | None:
    """A call of which the name and, as JSON, the arguments are known. None if it was not offered or they are malformed."""
    value, end = _json_at(body, 0)
    return None if body[end:].strip() else _call(name, value, types)


def mistral_calls(text: str, at: int, types: Types) -> tuple[list[ToolCall], int]:
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


def llama_calls(text: str, at: int, types: Types) -> tuple[list[ToolCall], int]:
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


def _stated(value: Any, types: Types) -> ToolCall | None:
    """The call that an object states. Llama 3 writes `parameters` for `arguments`."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return _call(value["name"], value.get("arguments", value.get("parameters")), types)


def _call(name: str, arguments: Any, types: Types) -> ToolCall | None:
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
        return _PYTHON.get(text, text)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
