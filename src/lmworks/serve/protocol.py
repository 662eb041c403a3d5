"""OpenAI's request bodies, with vLLM's additions: their schemas, and their conversion to a `Request` of the engine.

Unsupported parameters are rejected by name, not ignored, because a client could not notice the difference. Those that cannot change the
answer are listed in `parameters`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PrivateAttr, model_validator

from lmworks.errors import UserError
from lmworks.inference.sampling import GenerateOptions
from lmworks.serve.engine import Engine
from lmworks.serve.grammar import Grammar
from lmworks.serve.parameters import BadRequest, read_bias
from lmworks.serve.requests import Request
from lmworks.serve.structured import chosen_tools, require_distinct, restriction
from lmworks.tokenizer.messages import normal

MAX_ANSWERS = 128  # per request
_MAX_TOP = 20
_MAX_STOPS = 16
_MAX_STOP_IDS = 1000
_MAX_MESSAGES = 10_000
_MAX_TOOLS = 1000
T = TypeVar("T")


class _FirstErrorOnly(FailFast):
    """Stops validating a list at its first error; otherwise a million errors would be reported, for each member of a union."""

    def __hash__(self) -> int:  # required in a union
        return hash(type(self))


ListOf = Annotated[list[T], _FirstErrorOnly()]


class StreamOptions(BaseModel):
    """`continuous_usage_stats` of vLLM: the usage so far in every chunk. `include_obfuscation` asks for padding, which may be left out."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class StructuredOutputs(BaseModel):
    """vLLM's newer name of the `guided_*` parameters."""

    model_config = ConfigDict(extra="forbid")

    guided_json: dict[str, Any] | bool | None = Field(None, alias="json")
    guided_regex: str | None = Field(None, alias="regex")
    guided_choice: ListOf[str] | None = Field(None, alias="choice")


class Sampling(BaseModel):
    """Fields of both kinds of request. As with OpenAI, null means that the field is not set."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)  # beyond, logits leave the range of fp32
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(read_bias)] = ()
    seed: int | None = None
    stop: str | ListOf[str] = []
    stop_token_ids: Annotated[ListOf[int], Field(max_length=_MAX_STOP_IDS)] = []
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str = Field("", max_length=1000)
    guided_json: dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    structured_outputs: StructuredOutputs | None = None

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

    @property
    def restricted(self) -> bool:
        """Whether a grammar restricts the answer, which is compiled first."""
        return bool(self.guided)

    @property
    def guided(self) -> dict[str, Any]:
        """The `guided_*` parameters that are set."""
        names = ("guided_json", "guided_regex", "guided_choice")
        given = [one for one in (self, self.structured_outputs) if one is not None]
        found = [(name, value) for one in given for name in names if (value := getattr(one, name)) is not None]
        if len({name for name, _ in found}) < len(found):
            raise BadRequest("structured_outputs repeats a guided_* parameter; use one of them", "structured_outputs")
        return dict(found)

    def options(self, engine: Engine, max_new_tokens: int, logprobs: int | None) -> GenerateOptions:
        size = engine.vocabulary.size
        named = {"logit_bias": (token for token, _ in self.logit_bias), "stop_token_ids": self.stop_token_ids}
        for name, tokens in named.items():
            if (wrong := next((token for token in tokens if not 0 <= token < size), None)) is not None:
                raise BadRequest(f"{name} has the token id {wrong}, but the largest id is {size - 1}", name)
        stop_ids = (*(() if self.ignore_eos else engine.vocabulary.stop_ids), *self.stop_token_ids)
        if self.min_tokens and len(set(stop_ids)) >= size:
            raise BadRequest("stop_token_ids has all tokens, so min_tokens leaves none", "stop_token_ids")
        return GenerateOptions(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            stop_ids=stop_ids,
            logprobs=None if logprobs is None else min(logprobs, size),
            min_tokens=self.min_tokens,
            logit_bias=self.logit_bias,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
        )

    def require_consistent(self, limit: int | None, grammar: Grammar | None) -> None:
        """Raise `BadRequest` if `min_tokens` is above the limit that was asked for, or the end of a grammar's answer is excluded."""
        if limit is not None and self.min_tokens > limit:
            raise BadRequest(f"min_tokens is {self.min_tokens}, more than the limit of {limit}", "min_tokens")
        if grammar is not None and (self.min_tokens or self.ignore_eos):
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            raise BadRequest(f"{name} and a restriction of the answer exclude each other; remove one", name)


TokenIds = ListOf[int]


class CompletionRequest(Sampling):
    """`/v1/completions`."""

    prompt: str | ListOf[str] | TokenIds | ListOf[TokenIds] = ""
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=_MAX_TOP)
    echo: bool = False

    @model_validator(mode="before")
    @classmethod
    def _cap_prompts(cls, value: Any) -> Any:
        given = value.get("prompt")
        if isinstance(given, list) and len(given) > MAX_ANSWERS and not isinstance(given[0], int):
            raise BadRequest(f"prompt lists {len(given)} prompts; at most {MAX_ANSWERS} answers per request are allowed", "prompt")
        return value

    def request(self, engine: Engine) -> Request:
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens is 0, which is allowed only with echo, to score the prompt; set at least 1", "max_tokens")
        prompts = tuple(prompt for prompt in self._prompts(engine) for _ in range(self.n))
        if len(prompts) > MAX_ANSWERS:
            raise BadRequest(f"prompts times n is {len(prompts)}; at most {MAX_ANSWERS} answers per request are allowed", "prompt")
        options = self.options(engine, self.max_tokens, self.logprobs)
        scored = self.echo and self.logprobs is not None
        room = min((engine.room(len(prompt), self.max_tokens) for prompt in prompts), default=0)
        grammar = restriction(engine.vocabulary, room, None, None, self.guided, None, False)
        self.require_consistent(self.max_tokens, grammar)
        return Request(prompts, options, self.seed, self.stops, scored, grammar, self.cache_salt)

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
                raise BadRequest(f"prompt has the token id {wrong[0]}, but the largest id is {engine.vocabulary.size - 1}", "prompt")
            # A model needs at least one token: an empty prompt becomes the end of a document, after which a new one begins.
            prompts.append(tuple(ids) or (engine.vocabulary.eos_id,))
        return prompts


class Message(BaseModel):
    """A message in the forms of `lmworks.tokenizer.messages`, which are also those of tuning data."""

    model_config = ConfigDict(extra="ignore")

    role: str
    content: str | ListOf[dict[str, Any]] | None = None
    tool_calls: ListOf[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None
    reasoning_content: str | ListOf[dict[str, Any]] | None = None
    reasoning: str | ListOf[dict[str, Any]] | None = None
    refusal: str | None = None
    tool_call_id: str | None = None  # which Mistral's templates demand
    name: str | None = None

    def plain(self, number: int) -> dict[str, Any]:
        """The message in the form that chat templates expect; `number`, from 1, is for errors. Raises `BadRequest`."""
        given = self.model_dump(exclude_none=True)
        if self.content is None and not (self.tool_calls or self.function_call):
            given["content"] = ""
        try:
            return normal(number, given)
        except UserError as error:
            raise BadRequest(str(error), "messages") from None


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Validate the parts of a tool that are used later; returns it unchanged. Raises `BadRequest`."""
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest("a tool needs function.name", "tools")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None) or not isinstance((parameters or {}).get("properties"), dict | None):
        raise BadRequest("function.parameters of a tool must be a JSON schema, an object with properties", "tools")
    return tool


class TemplateOptions(BaseModel):
    """Options of the chat template, as in vLLM and SGLang: whether the model may think first."""

    enable_thinking: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        unknown = next((key for key in value if key not in cls.model_fields), None) if isinstance(value, dict) else None
        if unknown is not None:
            where = f"chat_template_kwargs.{unknown[:100]}"
            raise BadRequest(f"{where} is not supported by this server, only enable_thinking is; remove it", where)
        return value


class ChatRequest(Sampling):
    """`/v1/chat/completions`."""

    messages: Annotated[ListOf[Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=_MAX_TOP)
    tools: Annotated[ListOf[Annotated[dict[str, Any], AfterValidator(_tool)]], Field(max_length=_MAX_TOOLS)] | None = None
    parallel_tool_calls: bool = True
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    _read: list[dict[str, Any]] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _read_messages(self) -> ChatRequest:
        self._read = [message.plain(number) for number, message in enumerate(self.messages, 1)]
        return self

    @property
    def restricted(self) -> bool:
        return super().restricted or self.response_format is not None or self.tool_choice not in (None, "auto", "none")

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that are passed to the chat template."""
        return None if self.tool_choice == "none" else self.tools

    @property
    def thinking(self) -> bool | None:
        """Whether the model may think first; None leaves it to the template. `reasoning_effort` none means no, any other level yes."""
        asked = self.chat_template_kwargs.enable_thinking if self.chat_template_kwargs else None
        effort = None if self.reasoning_effort is None else self.reasoning_effort != "none"
        if None not in (asked, effort) and asked != effort:
            raise BadRequest("reasoning_effort and chat_template_kwargs.enable_thinking contradict each other", "reasoning_effort")
        return effort if asked is None else asked

    def request(self, engine: Engine) -> Request:
        require_distinct(self.tools or [])
        forced = chosen_tools(self.tool_choice, self.tools)
        if self.offered_tools and ((self.response_format or {}).get("type", "text") != "text" or self.guided):
            raise BadRequest("tools and a restriction of the answer exclude each other; remove one, or set tool_choice to none", "tools")
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
        prompt = tuple(engine.vocabulary.chat_prompt(self._read, self.offered_tools, self.thinking))
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        options = self.options(engine, min([*limits, engine.room(len(prompt))]), (self.top_logprobs or 0) if self.logprobs else None)
        several = self.parallel_tool_calls and self.tool_choice == "required"
        words = engine.vocabulary
        begins = words.state_of_thoughts(prompt)
        if begins == "free" and not words.thinks:
            begins = "closed"
        grammar = restriction(words, options.max_new_tokens, begins, self.response_format, self.guided, forced, several)
        self.require_consistent(min(limits, default=None), grammar)
        form = words.tool_form if self.offered_tools else None
        marks = (*words.thoughts.marks, *(form.marks if form else ()))
        return Request((prompt,) * self.n, options, self.seed, self.stops, grammar=grammar, salt=self.cache_salt, marks=marks)
