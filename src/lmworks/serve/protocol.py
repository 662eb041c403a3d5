"""What clients may ask: OpenAI's request bodies, checked, and turned into an `engine.Request`.

What this server cannot do is refused by name rather than ignored, because a client could not tell the difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator

from lmworks.errors import one_line
from lmworks.model.generate import GenerateOptions
from lmworks.recipe.tree.paths import nearest
from lmworks.serve.engine import Engine, Request

MAX_ANSWERS = 128  # answers that one request may ask for
_MAX_TOP = 20
_MAX_STOPS = 16
_MAX_MESSAGES = 10_000
_MAX_DEPTH = 64  # of lists and maps in each other
T = TypeVar("T")


class _UpToTheFirstFault(FailFast):
    """Of a list, since a million faults would otherwise be put into words, for each shape that it might have."""

    def __hash__(self) -> int:  # what stands in a union must have one
        return hash(type(self))


ListOf = Annotated[list[T], _UpToTheFirstFault()]


class BadRequest(Exception):
    """A request that is refused; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error the way OpenAI writes it."""
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    error = {"message": one_line(message), "type": kind, "param": param, "code": code}
    # message and param may quote half a surrogate pair from the request
    return {"error": {name: text and text.encode("utf-8", "replace").decode() for name, text in error.items()}}


class StreamOptions(BaseModel):
    include_usage: bool = False


class Sampling(BaseModel):
    """Fields that both kinds of request share. A null is the same as leaving the field out, as with OpenAI."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = None
    stop: str | ListOf[str] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    # for OpenAI's own books; no answer depends on them
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value

    @property
    def stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stops) > _MAX_STOPS:
            raise BadRequest(f"stop lists {len(stops)} strings; at most {_MAX_STOPS} are allowed", "stop")
        if "" in stops:
            raise BadRequest("stop contains an empty string, which would end every answer at once; remove it", "stop")
        return stops

    def refuse_unsupported(self) -> None:
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise BadRequest(f"{name} is not supported by this server; leave it out", name)

    def options(self, engine: Engine, max_new_tokens: int, logprobs: int | None) -> GenerateOptions:
        return GenerateOptions(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            stop_ids=engine.vocabulary.stop_ids,
            logprobs=None if logprobs is None else min(logprobs, engine.vocabulary.size),
        )


TokenIds = ListOf[int]


class CompletionRequest(Sampling):
    """`/v1/completions`."""

    prompt: str | ListOf[str] | TokenIds | ListOf[TokenIds] = ""
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=_MAX_TOP)
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _cap_prompts(cls, value: Any) -> Any:
        given = value.get("prompt")
        if isinstance(given, list) and len(given) > MAX_ANSWERS and not isinstance(given[0], int):
            raise BadRequest(f"prompt lists {len(given)} prompts; at most {MAX_ANSWERS} answers per request are allowed", "prompt")
        return value

    def request(self, engine: Engine) -> Request:
        self.refuse_unsupported()
        if self.best_of not in (None, self.n):
            raise BadRequest("best_of is not supported by this server; leave it out", "best_of")
        if self.suffix:
            raise BadRequest("suffix is not supported by this server; leave it out", "suffix")
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens is 0, which only makes sense with echo to score the prompt; ask for at least 1", "max_tokens")
        prompts = tuple(prompt for prompt in self._prompts(engine) for _ in range(self.n))
        if len(prompts) > MAX_ANSWERS:
            raise BadRequest(f"prompts times n is {len(prompts)}; at most {MAX_ANSWERS} answers per request are allowed", "prompt")
        options = self.options(engine, self.max_tokens, self.logprobs)
        return Request(prompts, options, self.seed, self.stops, score_prompts=self.echo and self.logprobs is not None)

    def _prompts(self, engine: Engine) -> list[tuple[int, ...]]:
        given = self.prompt
        several: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
        if not several:
            raise BadRequest("prompt is an empty list; give a string, a list of strings or token ids", "prompt")
        prompts = []
        for prompt in several:
            ids = engine.vocabulary.encode(prompt) if isinstance(prompt, str) else prompt
            wrong = [token for token in ids if not 0 <= token < engine.vocabulary.size]
            if wrong:
                raise BadRequest(f"prompt has the token id {wrong[0]}, but this model's ids end at {engine.vocabulary.size - 1}", "prompt")
            # A model continues something: an empty prompt begins a new document, as the end of the last one did in training.
            prompts.append(tuple(ids) or (engine.vocabulary.eos_id,))
        return prompts


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    tool_calls: ListOf[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """The form that chat templates take: text content."""
        content = self.content if isinstance(self.content, str | None) else "".join(part.text for part in self.content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content or ""}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as it was given, in which all that is read of it later has its form. Raises `BadRequest`."""
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest("a tool needs function.name", "tools")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None) or not isinstance((parameters or {}).get("properties"), dict | None):
        raise BadRequest("function.parameters of a tool is a JSON schema, an object with properties", "tools")
    return tool


class TemplateOptions(BaseModel):
    """vLLM's and SGLang's way to tell the chat template whether the model may think first."""

    enable_thinking: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        unknown = next((key for key in value if key not in cls.model_fields), None) if isinstance(value, dict) else None
        if unknown is not None:
            where = f"chat_template_kwargs.{unknown[:100]}"
            raise BadRequest(f"{where} is not known to this server, which takes only enable_thinking there; leave it out", where)
        return value


class ChatRequest(Sampling):
    """`/v1/chat/completions`."""

    messages: Annotated[ListOf[Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=_MAX_TOP)
    tools: ListOf[Annotated[dict[str, Any], AfterValidator(_tool)]] | None = None
    parallel_tool_calls: bool = True
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of."""
        return None if self.tool_choice == "none" else self.tools

    @property
    def thinking(self) -> bool | None:
        """Whether the model may think first; None leaves it to the template."""
        return self.chat_template_kwargs.enable_thinking if self.chat_template_kwargs else None

    def request(self, engine: Engine) -> Request:
        self.refuse_unsupported()
        if self.response_format and self.response_format.get("type") != "text":
            raise BadRequest("response_format other than text is not supported by this server; leave it out", "response_format")
        if self.tool_choice not in (None, "auto", "none"):
            raise BadRequest("tool_choice can only be auto or none here; leave it out", "tool_choice")
        if not self.parallel_tool_calls:
            raise BadRequest("parallel_tool_calls: false is not supported by this server; leave it out", "parallel_tool_calls")
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
        messages = [message.plain() for message in self.messages]
        prompt = tuple(engine.vocabulary.chat_prompt(messages, self.offered_tools, self.thinking))
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        options = self.options(engine, min([*limits, engine.room(len(prompt))]), (self.top_logprobs or 0) if self.logprobs else None)
        return Request((prompt,) * self.n, options, self.seed, self.stops)


R = TypeVar("R", bound=Sampling)


def parse(kind: type[R], body: bytes, models: Collection[str]) -> R:
    """A request body as `kind`, for a server that has `models`. Raises `BadRequest` with one line that names the field."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    _refuse_unknown(kind, value)
    if _deeper(value, _MAX_DEPTH):
        raise BadRequest(f"the body has lists and objects in each other more than {_MAX_DEPTH} deep")
    try:
        request = kind.model_validate(value)
    except ValidationError as error:
        # Where a field may have several shapes each reports a fault; the one that got furthest is the one that was meant.
        fault = max(error.errors(include_url=False, include_input=False), key=lambda fault: len(fault["loc"]))
        where = ".".join(str(part) for part in fault["loc"] if not (isinstance(part, str) and "[" in part))
        raise BadRequest(f"{where or 'body'}: {fault['msg']}", where or None) from None
    if request.model is not None:
        require_known(request.model, models)
    return request


def require_known(name: str, models: Collection[str]) -> None:
    """Raise `BadRequest` unless a model of this name is served."""
    if name not in models:
        has = " and ".join(f"`{known}`" for known in models)
        raise BadRequest(f"the model `{name}` does not exist; this server has {has}", "model", "model_not_found", 404)


def _refuse_unknown(kind: type[Sampling], value: dict[str, Any]) -> None:
    """Raise `BadRequest` that names the first parameter which is none of this kind of request's. A null is the same as none."""
    unknown = next((key for key, item in value.items() if key not in kind.model_fields and item is not None), None)
    if unknown is None:
        return
    name, other = unknown[:100], ChatRequest if kind is CompletionRequest else CompletionRequest
    close = nearest(name, list(kind.model_fields))
    if unknown in other.model_fields:
        hint = f"is a parameter of /v1/{'chat/completions' if other is ChatRequest else 'completions'} and not of this"
    else:
        hint = f"is not known to this server; did you mean {close}?" if close else "is not known to this server; leave it out"
    raise BadRequest(f"{name} {hint}", name)


def _deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [item for one in level if isinstance(one, (dict, list)) for item in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return False
    return any(isinstance(one, (dict, list)) for one in level)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def finite(logprob: float) -> float | None:
    """A log-probability as JSON can say it: null for none, and a very low number for minus infinity."""
    return None if math.isnan(logprob) else max(logprob, -9999.0)
