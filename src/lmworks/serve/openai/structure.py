"""What restricts the answer to a request: `response_format`, vLLM's `guided_*` parameters and `tool_choice`, as a grammar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmworks.serve.grammar import Grammar, GrammarError
from lmworks.serve.openai.errors import BadRequest
from lmworks.serve.structured import choice_grammar, json_grammar, regex_grammar, tools_grammar
from lmworks.serve.vocabulary import Vocabulary

_FORMATS = ("text", "json_object", "json_schema")
Make = Callable[[Vocabulary, bool], Grammar]


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
    vocabulary: Vocabulary, limit: int, thinking: bool, response_format: dict[str, Any] | None, guided: dict[str, Any],
    tools: list[dict[str, Any]] | None, several_calls: bool,
) -> Grammar | None:  # fmt: skip
    """The grammar of answers of at most `limit` tokens, compiled and known to have one; None if nothing restricts them.

    `guided` are the `guided_*` parameters that are set, `tools` those of which one must be called. Raises `BadRequest`.
    """
    wanted: dict[str, Make] = {}
    if response_format is not None and (schema := _schema_of(response_format)) is not None:
        wanted["response_format"] = lambda words, thinks: json_grammar(words, schema, thinks)
    makers: dict[str, Callable[..., Grammar]] = {
        "guided_json": json_grammar, "guided_regex": regex_grammar, "guided_choice": choice_grammar,
    }  # fmt: skip
    for name, value in guided.items():
        wanted[name] = lambda words, thinks, make=makers[name], value=value: make(words, value, thinks)  # type: ignore[misc]
    if tools is not None:
        wanted["tool_choice"] = lambda words, thinks: tools_grammar(words, tools, several_calls, thinks)
    if not wanted:
        return None
    if len(wanted) > 1:
        first, second = list(wanted)[:2]
        raise BadRequest(f"{first} and {second} both restrict the answer; use one of them", second)
    ((name, make),) = wanted.items()
    try:
        grammar = make(vocabulary, thinking)
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
