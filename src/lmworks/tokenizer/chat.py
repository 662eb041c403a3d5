"""Conversations to one string and to ids, with the assistant's part marked.

The template is `chat_template.jinja`, rendered as `transformers` renders it. Its form is GLM-4.x's:

    [gMASK]<sop><|system|>\\nBe brief.<|user|>\\nHi<|assistant|>\\nHello!<|user|>\\nBye<|assistant|>\\nSee you.<|endoftext|>

A turn has no closing token of its own. It ends where the next role token stands, so the assistant learns to end with <|user|>, with
<|observation|> after a tool call, and with <|endoftext|> where the conversation ends; these three are the `stop_ids`, and
generation_config.json must list the same. The newline after <|assistant|> belongs to the prompt, so answers begin with their first letter.
Whether the assistant wrote a token follows from the ids alone; the template needs no markers, which some engines do not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from lmworks.errors import UserError

if TYPE_CHECKING:
    from lmworks.tokenizer.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
# Unicode's noncharacters for internal use: one that the conversation does not contain marks what must stay text.
_MARKERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


def default_template() -> str:
    """The chat template that every tokenizer made here carries."""
    return files("lmworks.tokenizer").joinpath("chat_template.jinja").read_text(encoding="utf-8")


class Template:
    """A compiled chat template. Sandboxed, because a template is a program that arrives with somebody's model."""

    def __init__(self, source: str, where: str) -> None:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._where, self._errors = where, jinja2.TemplateError
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"{where} is not a chat template: {error}") from None

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
               add_generation_prompt: bool = False, thinking: bool | None = None) -> str:
        """The conversation as one string. `thinking` False empties the thinking block of the reply to come; True leaves it to the model."""
        options = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return self._template.render(
                messages=checked(messages), tools=tools or None, add_generation_prompt=add_generation_prompt, **options)
        except self._errors as error:
            raise UserError(f"{self._where} refused the conversation: {error}") from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
             sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def checked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` in the form that the template wants: tool arguments that are JSON text (OpenAI's form) become objects.

    Raises `UserError` naming the message that is not one.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise UserError("a conversation is a list of at least one message {role, content}")
    return [_message(number, message) for number, message in enumerate(messages, 1)]


def _message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UserError(f"message {number} is not an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise UserError(f"message {number} has the role {role!r}; the roles are {', '.join(ROLES)}")
    parts_of_text = isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content)
    if not (isinstance(content, str) or parts_of_text or (content is None and message.get("tool_calls"))):
        raise UserError(f"message {number} ({role}) has no text as content")
    if not message.get("tool_calls"):
        return message
    return message | {"tool_calls": [_tool_call(number, call) for call in message["tool_calls"]]}


def _tool_call(number: int, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"message {number} has a tool call without a function name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            raise UserError(f"message {number} has a tool call whose arguments are not JSON") from None
    if not isinstance(arguments, dict):
        raise UserError(f"message {number} has a tool call whose arguments are not an object")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def encode(tokenizer: Tokenizer, template: Template, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
           add_generation_prompt: bool = False, thinking: bool | None = None) -> list[int]:
    """Ids of the rendered conversation, in which only the template's own special tokens are special.

    What looks like one inside a message is broken up with a marker before rendering and mended after cutting.
    """
    messages = checked(messages)
    marker = _unused_marker(messages, tools)

    def protect(text: str) -> str:
        parts = tokenizer.split_special(text)
        parts[1::2] = [part[0] + marker + part[1:] for part in parts[1::2]]
        return "".join(parts)

    text = template.render(_map_text(messages, protect), _map_text(tools, protect), add_generation_prompt, thinking)
    return tokenizer.encode_parts(tokenizer.split_special(text), mend=lambda part: part.replace(marker, ""))


def _unused_marker(messages: Sequence[Any], tools: Any) -> str:
    everything: list[str] = []
    _map_text([*messages, *(tools or [])], lambda text: everything.append(text) or text)  # type: ignore[func-returns-value]
    text = "".join(everything)
    for marker in _MARKERS:
        if marker not in text:
            return marker
    raise UserError("the conversation contains all of the noncharacters U+FDD0 to U+FDEF; it is not text")


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_text(key, change): _map_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_text(item, change) for item in value]
    return value


def assistant_mask(ids: Sequence[int], assistant: int, system: int, newline: int, stops: Sequence[int]) -> list[bool]:
    """For each id whether the assistant wrote it: after <|assistant|> and its newline, up to and with the token that ends the turn.

    A turn that runs into <|system|> or another <|assistant|> is learned without an end, for generation does not stop at those.
    """
    mask, speaking = [False] * len(ids), False
    for at, token in enumerate(ids):
        if token == assistant:
            speaking = True
        elif token == system:
            speaking = False
        elif speaking and not (token == newline and ids[at - 1] == assistant):
            mask[at] = True
            speaking = token not in stops
    return mask
