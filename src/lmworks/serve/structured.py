"""Structured answers as grammars: JSON schemas, expressions, choices, and calls of tools in the form of the chat template.

`restriction` finds what a request asks for in `response_format`, vLLM's `guided_*` parameters and `tool_choice`. Grammars are written in
llguidance's form of Lark, in which `<[5]>` is the token 5 and `%json` is followed by a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmworks.serve.formats import FORMATS
from lmworks.serve.grammar import OPENED, PLAIN, THINKING, Grammar, GrammarError, compile_grammar, split_marks
from lmworks.serve.parameters import BadRequest
from lmworks.serve.vocabulary import Vocabulary
from lmworks.tokenizer.special import (
    ARGS,
    CALL,
    CALL_END,
    CALL_SEPARATOR,
    CALLS,
    CALLS_END,
    CHANNEL,
    CONSTRAIN,
    FUNCTION,
    FUNCTION_END,
    KEY,
    KEY_END,
    MESSAGE,
    ONE_CALL,
    ONE_CALL_END,
    PARAMETER,
    PARAMETER_END,
    TOOL_CALLS,
    VALUE,
    VALUE_END,
    State,
)

_LARGEST = 100_000  # characters of a schema, of an expression or of all choices
_TOP_KEYS = {"type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions", "$schema", "strict"}
_APPLIED = {"$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"}
_ELSEWHERE = re.compile(r'"\$ref": "#(?!/\$defs/|/definitions/)')
_PARTS = re.compile(r"\\.|.", re.DOTALL)  # of an expression: escapes and characters
_CODE = "```json"  # around arguments of DeepSeek-V3 and R1


def json_grammar(vocabulary: Vocabulary, schema: Any, begins: State | None = None) -> Grammar:
    """A JSON value of `schema`, without white space between its parts. `begins` is the state of thoughts at the end of a prompt of a chat:
    if they are free, they may come first, and if they are open, they are ended first. Raises `GrammarError`."""
    return _compile_text(vocabulary, f"%json {_schema(schema)}\n", begins)


def regex_grammar(vocabulary: Vocabulary, pattern: str, begins: State | None = None) -> Grammar:
    """Text that the regular expression matches as a whole. Raises `GrammarError`."""
    _require_size(pattern)
    return _compile_text(vocabulary, f"TEXT\nTEXT: {_expression(pattern)}\n", begins)


def choice_grammar(vocabulary: Vocabulary, choices: Sequence[str], begins: State | None = None) -> Grammar:
    """One of the texts. Raises `GrammarError`."""
    if not choices or not all(choices):
        raise GrammarError("it needs at least one choice, none of them empty")
    _require_size("".join(choices))
    return _compile_text(vocabulary, f"({' | '.join(map(_literal, choices))})\n", begins)


def tools_grammar(
    vocabulary: Vocabulary, tools: Sequence[Mapping[str, Any]], several: bool, begins: State | None = None
) -> Grammar:  # fmt: skip
    """At least one call of one of the tools, in the form of the chat template; more if `several`. Raises `GrammarError`, also for a
    template whose form is not known."""
    functions = [tool.get("function", tool) for tool in tools]
    write, before, between, after = _layout(vocabulary)
    calls = [write(vocabulary, number, function) for number, function in enumerate(functions)]
    one = f"({' | '.join(f'call_{number}' for number in range(len(calls)))})"
    more = f" ({between} {one})*" if several and between is not None else ""
    # a prompt may have begun a message of text, which has to end before that of a call
    thoughts = vocabulary.thoughts
    first = _marked(vocabulary, thoughts.end + thoughts.then) if begins == "closed" and thoughts.answer else ""
    return _compile(vocabulary, f"answer: {first} {before} {one}{more} {after}\n" + "".join(calls), begins)


def _layout(vocabulary: Vocabulary) -> tuple[Callable[[Vocabulary, int, Mapping[str, Any]], str], str, str | None, str]:
    """What writes a call in the form of the chat template, and what is before, between and after the calls; None between them where an
    answer has one call only."""
    template, form = vocabulary.tool_template, vocabulary.tool_form
    match form.family if form else None:
        case "mistral" if ARGS in template:
            return _named_call, "", "", ""
        case "mistral":
            return _object_call, f'{_tag(vocabulary, TOOL_CALLS)} "["', '", "', '"]"'
        case "llama":
            return partial(_object_call, arguments="parameters"), "", '"; "', ""
        case "deepseek":
            return _separated_call, _tag(vocabulary, CALLS), '"\\n"' if _CODE in template else "", _tag(vocabulary, CALLS_END)
        case "harmony":
            return _channel_call, "", None, ""
        case "hermes":
            return _json_call, "", "/[\\n]?/", ""
        case "glm" | "qwen3_coder" as family:
            return partial(_tagged_call, written=_GLM if family == "glm" else _CODER), "", "/[\\n]?/", ""
    raise GrammarError("the chat template writes tool calls in no form that this server knows, so none can be forced; use auto or none")


def _compile_text(vocabulary: Vocabulary, answer: str, begins: State | None) -> Grammar:
    """The grammar of an answer that is no call, with the mark that stands before its text in some forms."""
    mark = _marked(vocabulary, vocabulary.thoughts.answer) if begins in ("free", "open") else ""
    return _compile(vocabulary, f"answer: {mark} {answer}", begins)


def _compile(vocabulary: Vocabulary, rules: str, begins: State | None) -> Grammar:
    if begins not in ("free", "open"):
        return compile_grammar(vocabulary, PLAIN + rules)
    form = vocabulary.thoughts
    mark, end = _marked(vocabulary, form.begin), form.end + form.then
    space = "" if form.then else " /\\n*/"
    # an opened prompt may be followed by the mark once more, as R1 writes it
    thought = f"thought: {mark} thoughts{space}\nopened: ({mark})? thoughts{space}\n"
    if form.end in vocabulary.special:
        thought += f"thoughts: /(?s:.*)/ {_marked(vocabulary, end)}\n"
    else:  # text that goes on up to the mark would take the mark for more of it
        thought += f"thoughts[lazy]: /(?s:.*){re.escape(end).replace('/', chr(92) + '/')}/\n"
    return compile_grammar(vocabulary, (OPENED if begins == "open" else THINKING) + thought + rules, end)


def _object_call(vocabulary: Vocabulary, number: int, function: Mapping[str, Any], arguments: str = "arguments") -> str:
    """A call as JSON alone."""
    return f"call_{number}: {_call_object(function, arguments)}\n"


def _json_call(vocabulary: Vocabulary, number: int, function: Mapping[str, Any]) -> str:
    """A call as JSON between tags, as Qwen and Hermes write it."""
    return f'call_{number}: {_tag(vocabulary, CALL)} "\\n" {_call_object(function, "arguments")} "\\n" {_tag(vocabulary, CALL_END)}\n'


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object"} | (function.get("parameters") or {})


def _call_object(function: Mapping[str, Any], arguments: str) -> str:
    """A JSON object with name and arguments. The parameters are a schema of their own, because references begin at its root."""
    head = f'{{"name":{json.dumps(function["name"], ensure_ascii=False)},"{arguments}":'
    return f'{_literal(head)} %json {_schema(_parameters(function))} "}}"'


def _named_call(vocabulary: Vocabulary, number: int, function: Mapping[str, Any]) -> str:
    """A call with its name before the JSON of its arguments, as newer models of Mistral write it."""
    mark, args = _tag(vocabulary, TOOL_CALLS), _tag(vocabulary, ARGS)
    return f"call_{number}: {mark} {_literal(function['name'])} {args} %json {_schema(_parameters(function))}\n"


def _separated_call(vocabulary: Vocabulary, number: int, function: Mapping[str, Any]) -> str:
    """A call as DeepSeek writes it: V3 and R1 with a type and a block of code, V3.1 without."""
    first, separator, last = (_tag(vocabulary, mark) for mark in (ONE_CALL, CALL_SEPARATOR, ONE_CALL_END))
    name, arguments = function["name"], f"%json {_schema(_parameters(function))}"
    if _CODE in vocabulary.tool_template:
        head = f'"function" {separator} {_literal(f"{name}{chr(10)}{_CODE}{chr(10)}")}'
        return f'call_{number}: {first} {head} {arguments} "\\n```" {last}\n'
    return f"call_{number}: {first} {_literal(name)} {separator} {arguments} {last}\n"


def _channel_call(vocabulary: Vocabulary, number: int, function: Mapping[str, Any]) -> str:
    """A call as a message to a function, as gpt-oss writes it. The model then stops."""
    head = _marked(vocabulary, f"{CHANNEL}commentary to=functions.", function["name"], f" {CONSTRAIN}json{MESSAGE}")
    return f"call_{number}: {head} %json {_schema(_parameters(function))}\n"


@dataclass(frozen=True)
class _Elements:
    """What a form with an element for each argument writes before and after the name of a function and of an argument, behind its value,
    which may not be in it, and behind the last one."""

    function: tuple[str, str]
    argument: tuple[str, str]
    value_end: str
    last: str


_GLM = _Elements((CALL, "\n"), (KEY, f"{KEY_END}\n{VALUE}"), f"{VALUE_END}\n", CALL_END)
_CODER = _Elements((f"{CALL}\n{FUNCTION}", ">\n"), (PARAMETER, ">\n"), f"\n{PARAMETER_END}\n", f"{FUNCTION_END}\n{CALL_END}")


def _tagged_call(vocabulary: Vocabulary, number: int, function: Mapping[str, Any], written: _Elements) -> str:
    """A call with an element for each argument, as GLM-4.x and Qwen3-Coder write it: strings bare, other values as JSON."""
    parameters = function.get("parameters") or {}
    beyond = sorted(set(parameters) - _TOP_KEYS)
    if beyond:
        raise GrammarError(f"the parameters of {function['name']} have {beyond[0]!r}, but a forced call needs plain properties")
    properties, required = parameters.get("properties") or {}, parameters.get("required") or []
    if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
        raise GrammarError(f"the parameters of {function['name']} require what is not among the properties")
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    rules, parts = "", []
    for place, (name, schema) in enumerate(properties.items()):
        argument = f"argument_{number}_{place}"
        content, more = _argument(f"TEXT_{number}_{place}", schema, shared, written.value_end.strip())
        before, after = written.argument
        rules += f"{argument}: {_marked(vocabulary, before, name, after)} {content} {_marked(vocabulary, written.value_end)}\n{more}"
        parts.append(argument if name in required else f"{argument}?")
    before, after = written.function
    head = _marked(vocabulary, before, function["name"], after)
    return f"call_{number}: {head} {' '.join(parts)} {_marked(vocabulary, written.last)}\n{rules}"


def _argument(terminal: str, schema: Any, shared: Mapping[str, Any], end: str) -> tuple[str, str]:
    """The content of an argument that `end` follows, and a rule for it."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return terminal, f"{terminal}: {_text(schema)} & ~/(?s:.*){end.replace('/', chr(92) + '/')}(?s:.*)/\n"
    json_ = _schema({**schema, **shared} if isinstance(schema, dict) else schema)
    if _ELSEWHERE.search(json_):
        raise GrammarError("a $ref of a forced call refers to $defs or definitions of the parameters")
    return f"%json {json_}", ""


def _text(schema: Mapping[str, Any]) -> str:
    """The texts of a schema of strings, without quotes: what all of its keywords allow. Keywords of other types do not restrict strings."""
    if applied := sorted(_APPLIED & set(schema)):
        raise GrammarError(f"a string has {applied[0]!r}, but a forced call needs enum, const, pattern, format, minLength or maxLength")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not _is_length(least) or not (most is None or _is_length(most)):
        raise GrammarError(f"minLength and maxLength are whole numbers up to {_LARGEST:,}")
    parts = [f"/(?s:.){{{least},{'' if most is None else most}}}/"]
    if "pattern" in schema:
        parts.append(_expression(_found_in_text(schema["pattern"])))
    if "format" in schema:
        if not isinstance(name := schema["format"], str) or name not in FORMATS:
            raise GrammarError(f"the format {str(name)[:100]!r} is none of {', '.join(FORMATS)}")
        parts.append(_expression(FORMATS[name]))
    for key in ("enum", "const"):
        if key not in schema:
            continue
        allowed = schema["enum"] if key == "enum" else [schema["const"]]
        if not isinstance(allowed, list) or not any(isinstance(one, str) for one in allowed):
            raise GrammarError(f"the {key} of a string has no string")
        parts.append(f"({' | '.join(_literal(one) for one in allowed if isinstance(one, str))})")
    return " & ".join(parts)


def _found_in_text(pattern: Any) -> str:
    """An expression of whole texts for a pattern of JSON schema, which may match anywhere in a text where it has no anchors."""
    if not isinstance(pattern, str):
        raise GrammarError("a pattern is a string")
    _require_size(pattern)
    choices: list[list[str]] = [[]]
    depth, in_class = 0, False
    for part in _PARTS.findall(pattern):
        in_class = part == "[" or (in_class and part != "]")
        depth += 0 if in_class else (part == "(") - (part == ")")
        if part == "|" and not in_class and not depth:
            choices.append([])
        else:
            choices[-1].append(part)
    return "|".join(map(_between_anchors, choices))


def _between_anchors(parts: Sequence[str]) -> str:
    first, last = parts[:1] == ["^"], parts[-1:] == ["$"]
    return f"{'' if first else '(?s:.*)'}(?:{''.join(parts[first : len(parts) - last])}){'' if last else '(?s:.*)'}"


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _schema(schema: Any) -> str:
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise GrammarError("a schema is a JSON object")
    text = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
    _require_size(text)
    return text


def _require_size(text: str) -> None:
    if len(text) > _LARGEST:
        raise GrammarError(f"it has {len(text):,} characters; at most {_LARGEST:,} are allowed")


def _tag(vocabulary: Vocabulary, name: str) -> str:
    """The token of a mark, or its text in a vocabulary without it."""
    return f"<[{vocabulary.special[name]}]>" if name in vocabulary.special else _literal(name)


def _marked(vocabulary: Vocabulary, before: str, name: str = "", after: str = "") -> str:
    """Text of a template, with the tokens of its marks, and in it a name, which has none."""
    parts = [*split_marks(vocabulary, before), *([name] if name else []), *split_marks(vocabulary, after)]
    return " ".join(_literal(part) if isinstance(part, str) else f"<[{part}]>" for part in parts)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _expression(pattern: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, 'dw')}/"


_FORMATS = ("text", "json_object", "json_schema")
Make = Callable[[Vocabulary], Grammar]


def require_distinct(tools: list[dict[str, Any]]) -> None:
    """Raise `BadRequest` if two tools have the same name."""
    seen: set[str] = set()
    for tool in tools:
        name = tool.get("function", tool)["name"]
        if name in seen:
            raise BadRequest(f"tools has two functions with the name {name}; rename one", "tools")
        seen.add(name)


def chosen_tools(choice: Any, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools one of which must be called; None if the model decides. Raises `BadRequest`."""
    if choice in (None, "auto", "none"):
        return None
    if not tools:
        raise BadRequest("tool_choice demands a call, but the request has no tools", "tool_choice")
    if choice == "required":
        return tools
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest('tool_choice is none, auto, required or {"type": "function", "function": {"name": NAME}}', "tool_choice")
    named = [tool for tool in tools if tool.get("function", tool)["name"] == function["name"]]
    if not named:
        known = ", ".join(tool.get("function", tool)["name"] for tool in tools)[:300]
        raise BadRequest(f"tool_choice names {function['name'][:100]!r}, but the tools are {known}", "tool_choice")
    return named


def restriction(
    vocabulary: Vocabulary, limit: int, begins: State | None, response_format: dict[str, Any] | None, guided: dict[str, Any],
    tools: list[dict[str, Any]] | None, several_calls: bool,
) -> Grammar | None:  # fmt: skip
    """The grammar of answers of at most `limit` tokens, compiled and known to have one; None if nothing restricts them.

    `begins` is the state of thoughts at the end of a prompt of a chat, `guided` are the `guided_*` parameters that are set, and `tools`
    those of which one must be called. Raises `BadRequest`.
    """
    wanted: dict[str, Make] = {}
    if response_format is not None and (schema := _schema_of(response_format)) is not None:
        wanted["response_format"] = lambda words: json_grammar(words, schema, begins)
    makers: dict[str, Callable[..., Grammar]] = {
        "guided_json": json_grammar, "guided_regex": regex_grammar, "guided_choice": choice_grammar,
    }  # fmt: skip
    for name, value in guided.items():
        wanted[name] = lambda words, make=makers[name], value=value: make(words, value, begins)  # type: ignore[misc]
    if tools is not None:
        wanted["tool_choice"] = lambda words: tools_grammar(words, tools, several_calls, begins)
    if not wanted:
        return None
    if len(wanted) > 1:
        first, second = list(wanted)[:2]
        raise BadRequest(f"{first} and {second} both restrict the answer; use one of them", second)
    ((name, make),) = wanted.items()
    try:
        grammar = make(vocabulary)
        grammar.answer(limit)
    except GrammarError as error:
        raise BadRequest(f"{name}: {error}", name) from None
    return grammar


def _schema_of(given: dict[str, Any]) -> Any:
    """The schema of a `response_format`; None for text."""
    kind = given.get("type")
    if kind not in _FORMATS:
        raise BadRequest(f"response_format.type is {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}", "response_format")
    if kind != "json_schema":
        if "json_schema" in given or "schema" in given:
            raise BadRequest(f"response_format has the type {kind} and a schema; use one of them", "response_format")
        return {"type": "object"} if kind == "json_object" else None
    described = given.get("json_schema")
    if not isinstance(described, dict) or "schema" not in described:
        raise BadRequest("response_format of the type json_schema needs json_schema.schema", "response_format")
    return described["schema"]
