"""Compiling and running chat templates: in this process for those that lmworks ships, in a process with limits for all others."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

from lmworks.untrusted.limited_process import CallFailed, LimitedProcess, ProcessDied

SECONDS, MEMORY = 10.0, 1 << 30  # of processor time for one conversation; of address space
GENERATION = "lmworks_generation_marks"
"""The variable with the two characters that are put around what a template has between {% generation %} and {% endgeneration %}."""
DATE = "lmworks_date"
"""The variable with the day, in ISO 8601, that `strftime_now` tells a template, at midnight; without it, that is the present moment."""
Render = Callable[..., str]


class Refused(Exception):
    """A template does not compile, or fails to render a conversation."""


@lru_cache(8)  # each opening of a tokenizer asks for it, and compiling takes 50 ms
def compiled(source: str) -> Render:
    """A template as a function of its variables, which raises `Refused`. Only jinja2's sandbox restricts it."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    template = _raise_refused(environment.from_string, source)

    def render(**variables: Any) -> str:
        if (day := variables.pop(DATE, None)) is not None:
            variables["strftime_now"] = datetime.fromisoformat(day).strftime
        return str(_raise_refused(template.render, **variables))

    return render


@lru_cache(1)
def _generation_tag() -> Any:
    """The tag of `transformers` around what the assistant writes. It has no effect on the text unless `GENERATION` is given."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark", [nodes.ContextReference()]), [], [], body).set_lineno(line)

        def mark(self, context: Any, caller: Any) -> str:
            begin, end = context.get(GENERATION) or ("", "")
            return f"{begin}{caller()}{end}"

    return GenerationTag


def _raise_refused(call: Callable[..., Any], /, *arguments: Any, **variables: Any) -> Any:
    try:
        return call(*arguments, **variables)
    except Exception as error:  # untrusted code may raise anything
        raise Refused(" ".join(str(error).split()) or type(error).__name__) from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
             sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_MOST_TEXT, _MOST_FRAME = 8, 1 << 20
"""An answer may have so many bytes for each byte of template and conversation, and so many besides."""


def compiled_in_process(source: str) -> Render:
    """Like `compiled`, but in a separate process, which is killed if it takes too much time or memory, and restarted when needed. It is
    shared by all who load the same template, as the stages of a run do: to start one takes 0.08 s."""
    limited = _process_of(source, SECONDS, MEMORY)

    def render(**variables: Any) -> str:
        return _request(limited, source, variables)

    _request(limited, source, None)
    return render


@lru_cache(2)
def _process_of(source: str, seconds: float, memory: int) -> LimitedProcess:
    """A process for one template: what its code does there reaches no other."""
    return LimitedProcess("lmworks.tokenizer.rendering:renderer", seconds, memory)


def _request(limited: LimitedProcess, source: str, variables: dict[str, Any] | None) -> str:
    try:
        request = json.dumps([source, variables]).encode()
    except (TypeError, ValueError, RecursionError) as error:  # a message may hold what is no JSON, as bytes of a table
        raise Refused(str(error)) from None
    try:
        return str(json.loads(limited(request, most=_MOST_TEXT * len(request) + _MOST_FRAME)))
    except ProcessDied:
        raise Refused(f"it takes more than {SECONDS:g} s or {MEMORY >> 20} MB") from None
    except CallFailed as reason:
        raise Refused(str(reason).removeprefix(f"{Refused.__name__}: ")) from None
    except OSError as error:
        raise Refused(str(error)) from None


def renderer() -> Callable[[bytes], bytes]:
    """The function of the separate process: renders a template with variables; without variables it only compiles the template."""
    import jinja2.ext  # noqa: F401  imported here, so that it does not count towards the first call
    import jinja2.sandbox  # noqa: F401

    latest = lru_cache(1)(compiled)

    def answer(data: bytes) -> bytes:
        source, variables = json.loads(data)
        render = latest(source)
        return json.dumps("" if variables is None else render(**variables)).encode()

    return answer
