"""Parsing replies of the assistant into reasoning, answer, and tool calls in OpenAI's form: the inverse of the chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmworks.tokenizer.calls import ToolCall, deepseek_calls, json_call, llama_calls, mistral_calls, tagged_call, types_of
from lmworks.tokenizer.special import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    CHANNEL,
    CHANNELS,
    CONSTRAIN,
    MESSAGE,
    MESSAGE_ENDS,
    START,
    THINK,
    State,
    ThoughtForm,
    ToolForm,
)  # fmt: skip

_ENCLOSED = {CALL: (CALL_END, tagged_call), CALLS: (CALLS_END, deepseek_calls)}


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

    Reasoning is at the beginning, between the marks of `thoughts` (by default <think> and </think>); tool calls may be anywhere after it.
    The concatenated parts do not depend on how the text is cut into pieces. Text without such markup is returned unchanged. White space
    around markup is removed; an incomplete or malformed call remains text. `tools` are the tools offered: without any, nothing is parsed
    as a call. `begins` is the state of thoughts at the end of the prompt: where it has opened them, the reply begins in them, and may open
    them once more; where it has closed them, no others begin. `form` is that of the chat template's calls (`tool_form`); without one,
    calls are in <tool_call>. Calls of Mistral and Llama have no mark at their end and are returned by `finish`, and so is an answer of
    Llama that begins with "{", because it may be a call without any mark.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]] | None = None, begins: State = "free", form: ToolForm | None = None,
        thoughts: ThoughtForm | None = None,
    ) -> None:  # fmt: skip
        self._types = dict(map(types_of, tools or ()))
        self._family = form.family if form else "hermes"
        self._mark = form.marks[0] if form else CALL
        self._thought = thoughts or THINK
        self._held = self._gap = ""
        self._pushed = 0  # characters
        self.thought_spans: list[tuple[int, int]] = []
        """Where thoughts are in the text so far, with their marks, in characters."""
        self._begins = begins
        self._state = "opening" if begins == "closed" else "start"
        self._trim = begins == "closed"  # markup has just ended: the newline after it is not content

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
        begun, mark = self._held.lstrip(), self._thought.begin
        if begun.startswith(mark):
            self._held, self._state = begun[len(mark) :], "thoughts"
        elif last or not mark.startswith(begun):
            self._state = "thoughts" if self._begins == "open" else "opening"

    def _thoughts(self, reply: Reply, last: bool) -> None:
        thought, closed, rest = self._held.partition(self._thought.end)
        self.thought_spans = [(0, self._pushed - len(rest))]
        if closed:
            reply.reasoning += thought
            self._held, self._state, self._trim = rest, "opening", True
        else:
            keep = 0 if last else _partial_match(self._held, self._thought.end)
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
        calls, end = llama_calls(self._held, 0, self._types)
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
            self._held, self._state = rest, "enclosed" if self._mark in _ENCLOSED else "unclosed"
            return
        keep = _partial_match(text, self._mark) if self._types and not last else 0
        if self._types and not last:  # white space before a call is not content, and a call may follow
            keep = len(text) - len(text[: len(text) - keep].rstrip())
        reply.content += text[: len(text) - keep]
        self._held = text[len(text) - keep :]

    def _enclosed(self, reply: Reply, last: bool) -> None:
        """Calls between two marks."""
        end, read_calls = _ENCLOSED[self._mark]
        body, closed, rest = self._held.partition(end)
        if not closed and not last:
            return
        # DeepSeek-R1's template leaves the second mark out, and closes each call
        calls = read_calls(body, self._types) if closed or self._mark == CALLS else []
        if not calls:
            reply.content += self._gap + self._mark + body + closed
        reply.calls += calls
        self._held, self._state, self._trim = rest, "content", bool(calls)

    def _unclosed(self, reply: Reply, last: bool) -> None:
        """Calls behind a mark that nothing closes."""
        if not last:
            return
        read_calls = mistral_calls if self._family == "mistral" else llama_calls
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


_ENDS = re.compile("|".join(map(re.escape, (*MESSAGE_ENDS, START, CHANNEL))))
_HEADERS = (START, CHANNEL, CONSTRAIN, MESSAGE, "to=")
_CHANNEL, _RECIPIENT = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)"), re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class _ChannelReader(ReplyReader):
    """Parses a reply in OpenAI's harmony form: messages, each with a header that names a channel and, for a call, its recipient.

    What is in the channel `analysis` is reasoning, a message to an offered tool is a call, and any other is content. Parts of several
    messages are on lines of their own. Text without a header is content.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]] | None = None, begins: State = "free", form: ToolForm | None = None,
        thoughts: ThoughtForm | None = None,
    ) -> None:  # fmt: skip
        super().__init__(tools, begins, form, thoughts)
        self._told: set[str] = set()  # the parts that earlier messages have
        self._state, self._trim = "header", False
        if begins != "free":
            self._begin_message("analysis" if begins == "open" else "final", "", 0)

    def _begin_message(self, channel: str, to: str, at: int) -> None:
        self._to, self._part, self._state = to, "reasoning" if channel == "analysis" else "content", "message"
        self._first = True
        if self._part == "reasoning" and to not in self._types:
            self.thought_spans.append((at, at))

    def _header(self, reply: Reply, last: bool) -> None:
        begun = self._held.lstrip()
        header, found, rest = begun.partition(MESSAGE)
        at = self._pushed - len(begun)
        if found and begun.startswith(_HEADERS):
            channel, to = _CHANNEL.search(header), _RECIPIENT.search(header)
            self._held = rest
            self._begin_message(channel[1] if channel else "final", to[1] if to else "", at)
        elif last and begun.startswith(_HEADERS[:4]):  # the reply ends in a header
            self._held = ""
        elif begun and (last or not (begun.startswith(_HEADERS) or any(mark.startswith(begun) for mark in _HEADERS))):
            self._begin_message("final", "", at)

    def _message(self, reply: Reply, last: bool) -> None:
        end = _ENDS.search(self._held)
        called = self._to in self._types
        if called and not end and not last:
            return
        keep = 0 if end or last else max(_partial_match(self._held, mark) for mark in (*MESSAGE_ENDS, START, CHANNEL))
        size = end.start() if end else len(self._held) - keep
        text, self._held = self._held[:size], self._held[size:]
        if end and end[0] in MESSAGE_ENDS:
            self._held = self._held[len(end[0]) :]
        call = json_call(self._to, text, self._types) if called else None
        if call:
            reply.calls.append(call)
        elif text:
            line = "\n" if self._first and self._part in self._told else ""
            setattr(reply, self._part, getattr(reply, self._part) + line + text)
            self._told.add(self._part)
            self._first = False
        if self._part == "reasoning" and not called:
            self.thought_spans[-1] = self.thought_spans[-1][0], self._pushed - len(self._held)
        if end:
            self._state = "header"


def reply_reader(
    tools: Sequence[Mapping[str, Any]] | None = None, begins: State = "free", form: ToolForm | None = None,
    thoughts: ThoughtForm | None = None,
) -> ReplyReader:  # fmt: skip
    """The reader of replies in the forms of a chat template (`tool_form`, `thought_form`) behind a prompt (`ThoughtForm.state`)."""
    return (_ChannelReader if thoughts == CHANNELS else ReplyReader)(tools, begins, form, thoughts)


def read(
    text: str, tools: Sequence[Mapping[str, Any]] | None = None, begins: State = "free", form: ToolForm | None = None,
    thoughts: ThoughtForm | None = None,
) -> Reply:  # fmt: skip
    """The parts of a whole reply."""
    return reply_reader(tools, begins, form, thoughts).whole(text)


def _partial_match(text: str, mark: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `mark`."""
    return next(size for size in range(min(len(mark) - 1, len(text)), -1, -1) if text.endswith(mark[:size]))
