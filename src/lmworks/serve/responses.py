"""Builds OpenAI's response bodies from the engine's events."""

from __future__ import annotations

import math
import secrets
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lmworks.inference.sampling import Token
from lmworks.serve.engine import Engine
from lmworks.serve.protocol import ChatRequest, CompletionRequest
from lmworks.serve.requests import Delta, Request, Scores
from lmworks.serve.vocabulary import Placement
from lmworks.tokenizer.calls import ToolCall
from lmworks.tokenizer.reply import Reply, reply_reader
from lmworks.tokenizer.special import ToolForm


@dataclass
class Usage:
    """Tokens of one request. A prompt that is repeated by `n` is counted once, and so are its `cached_tokens`: those that none of its
    answers had to read, because an earlier prompt or answer began with them. `reasoning` are those of thoughts; None: they are not told
    apart."""

    prompts: tuple[int, ...]
    n: int
    reasoning: dict[int, int] | None = None
    generated: dict[int, int] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)

    def count(self, delta: Delta) -> None:
        self.generated[delta.index] = delta.generated
        self.hits[delta.index] = delta.hit_tokens

    def body(self) -> dict[str, Any]:
        prompt, written = sum(self.prompts), sum(self.generated.values())
        groups = (range(first * self.n, (first + 1) * self.n) for first in range(len(self.prompts)))
        cached = sum(min((self.hits[index] for index in group if index in self.hits), default=0) for group in groups)
        details = {} if self.reasoning is None else {"completion_tokens_details": {"reasoning_tokens": sum(self.reasoning.values())}}
        return {
            "prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": cached}, **details,
        }  # fmt: skip


@dataclass
class _Choice:
    text: str = ""
    tokens: list[Placement] = field(default_factory=list)
    finish: str | None = None


class _Reply:
    """The common part of full and streamed replies of both kinds."""

    prefix, whole, part = "", "", ""

    def __init__(self, engine: Engine, asked: CompletionRequest | ChatRequest, request: Request) -> None:
        self._engine, self._asked, self._request = engine, asked, request
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self.usage = Usage(tuple(len(prompt) for prompt in request.prompts[:: asked.n]), asked.n)
        self._choices = [_Choice() for _ in request.prompts]

    def add(self, event: Delta | Scores) -> None:
        """Add an event to a full reply."""
        if isinstance(event, Delta):
            self.usage.count(event)
            choice = self._choices[event.index]
            choice.text += event.text
            choice.tokens += event.tokens
            choice.finish = event.finish

    def body(self) -> dict[str, Any]:
        """The full reply, after all events."""
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._head(self.whole), "choices": choices, "usage": self.usage.body()}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks that come before the first token."""
        return iter(())

    def chunks(self, event: Delta | Scores) -> Iterator[dict[str, Any]]:
        """Streamed chunks for one event."""
        raise NotImplementedError

    def closing(self) -> Iterator[dict[str, Any]]:
        """Chunks after the last token."""
        if self._wants_usage:
            yield {**self._head(self.part), "choices": [], "usage": self.usage.body()}

    @property
    def _wants_usage(self) -> bool:
        return self._asked.stream_options is not None and self._asked.stream_options.include_usage

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._engine.name}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        body, options = {**self._head(self.part), "choices": [choice]}, self._asked.stream_options
        if options is None or not (options.include_usage or options.continuous_usage_stats):
            return body
        return {**body, "usage": self.usage.body() if options.continuous_usage_stats else None}

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError


class Completion(_Reply):
    """`/v1/completions`. With `echo` the prompt comes first, with its log-probabilities if they were requested."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"
    _asked: CompletionRequest

    def __init__(self, engine: Engine, asked: CompletionRequest, request: Request) -> None:
        super().__init__(engine, asked, request)
        self._prompts = [engine.vocabulary.decode(prompt) if asked.echo else "" for prompt in request.prompts]
        self._scored: dict[int, tuple[Placement, ...]] = {}
        self._started: set[int] = set()

    def add(self, event: Delta | Scores) -> None:
        if isinstance(event, Scores):
            self._scored[event.index] = self._engine.vocabulary.place(event.tokens)
        super().add(event)

    def chunks(self, event: Delta | Scores) -> Iterator[dict[str, Any]]:
        self.add(event)
        if isinstance(event, Scores):
            return
        text, tokens = event.text, self._shifted(event.index, event.tokens)
        if event.index not in self._started:
            self._started.add(event.index)
            text, tokens = self._prompts[event.index] + text, [*self._scored.get(event.index, ()), *tokens]
        yield self._chunk({"index": event.index, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": event.finish})

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        tokens = [*self._scored.get(index, ()), *self._shifted(index, choice.tokens)]
        text = self._prompts[index] + choice.text
        return {"index": index, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": choice.finish}

    def _shifted(self, index: int, tokens: Iterable[Placement]) -> list[Placement]:
        return [Placement(placed.token, placed.offset + len(self._prompts[index])) for placed in tokens]

    def _logprobs(self, tokens: list[Placement]) -> dict[str, Any] | None:
        if self._asked.logprobs is None:
            return None
        text = self._engine.vocabulary.token_text
        return {
            "tokens": [text(placed.token.id) for placed in tokens],
            "token_logprobs": [_finite(placed.token.logprob) for placed in tokens],
            "top_logprobs": [_top(placed.token, text) for placed in tokens] if self._asked.logprobs else None,
            "text_offset": [placed.offset for placed in tokens],
        }


def _finite(logprob: float) -> float | None:
    """A log-probability as a JSON value: null for nan, and a very low number for minus infinity."""
    return None if math.isnan(logprob) else max(logprob, -9999.0)


def _top(token: Token, text: Any) -> dict[str, float | None] | None:
    """The most likely tokens, and the token itself if it is none of them, as OpenAI and vLLM list them."""
    if not token.top:
        return None
    # Ids with the same text (parts of a character) share a key: it is that of the token itself, else of the most likely one, listed first.
    likeliest = {text(other): _finite(value) for other, value in reversed(token.top)}
    return likeliest | {text(token.id): _finite(token.logprob)}


def _call(call: ToolCall, form: ToolForm | None) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    # when the call comes back, Mistral's templates demand an id of 9 letters and digits
    identity = secrets.token_hex(5)[:9] if form and form.family == "mistral" else f"call_{secrets.token_hex(12)}"
    return {"id": identity, "type": "function", "function": function}


def _offset(placed: Placement) -> int:
    return placed.offset


class Chat(_Reply):
    """`/v1/chat/completions`. Reasoning is returned as `reasoning_content`, calls of offered tools as `tool_calls`."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _asked: ChatRequest

    def __init__(self, engine: Engine, asked: ChatRequest, request: Request) -> None:
        super().__init__(engine, asked, request)
        self._form = engine.vocabulary.tool_form
        words, tools = engine.vocabulary, asked.offered_tools
        begins = words.state_of_thoughts(request.prompts[0])  # `n` times the same
        self._readers = [reply_reader(tools, begins, self._form, words.thoughts) for _ in request.prompts]
        self._calls = [0] * len(request.prompts)
        self._most_calls = None if asked.parallel_tool_calls else 1
        self.usage.reasoning = {}

    def opening(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._choices)):
            yield self._part(index, {"role": "assistant", "content": ""})

    def chunks(self, event: Delta | Scores) -> Iterator[dict[str, Any]]:
        self.add(event)
        if isinstance(event, Scores):
            return
        index, reader = event.index, self._readers[event.index]
        reply, logprobs = reader.push(event.text), self._logprobs(event.tokens)
        self._count_reasoning(index)
        if reply or event.tokens:
            yield self._part(index, self._delta(index, reply), logprobs)
        if event.finish:
            if rest := reader.finish():
                yield self._part(index, self._delta(index, rest))
            yield self._part(index, {}, finish="tool_calls" if self._calls[index] else event.finish)

    def _delta(self, index: int, reply: Reply) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": reply.content} if reply.content or not reply else {}
        if reply.reasoning:
            delta["reasoning_content"] = reply.reasoning
        first = self._calls[index]
        if calls := reply.calls[: None if self._most_calls is None else max(0, self._most_calls - first)]:
            delta["tool_calls"] = [{"index": first + number, **_call(call, self._form)} for number, call in enumerate(calls)]
            self._calls[index] += len(calls)
        return delta

    def _part(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None) -> dict[str, Any]:
        return self._chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish})

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        reply = self._readers[index].whole(choice.text)
        self._count_reasoning(index)
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            calls = [_call(call, self._form) for call in reply.calls[: self._most_calls]]
            message |= {"content": reply.content or None, "tool_calls": calls}
        finish = "tool_calls" if reply.calls else choice.finish
        return {"index": index, "message": message, "logprobs": self._logprobs(choice.tokens), "finish_reason": finish}

    def _count_reasoning(self, index: int) -> None:
        tokens = self._choices[index].tokens
        assert self.usage.reasoning is not None
        self.usage.reasoning[index] = sum(
            bisect_left(tokens, end, key=_offset) - bisect_left(tokens, begin, key=_offset)
            for begin, end in self._readers[index].thought_spans
        )

    def _logprobs(self, tokens: Iterable[Placement]) -> dict[str, Any] | None:
        if not self._asked.logprobs:
            return None
        entries = []
        for token in (placed.token for placed in tokens):
            entries.append({**self._entry(token.id, token.logprob), "top_logprobs": [self._entry(*other) for other in token.top]})
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        vocabulary = self._engine.vocabulary
        return {"token": vocabulary.token_text(token), "bytes": list(vocabulary.token_bytes(token)), "logprob": _finite(logprob)}
