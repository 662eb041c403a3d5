"""Which tokens of a conversation the assistant writes, for a chat template of any kind.

Nothing is assumed about the names of special tokens. A template that has {% generation %} blocks says it itself. For any other, the
prompt of an answer is the conversation before it, rendered with the generation prompt. It must be a prefix of the whole conversation, and
what follows it, up to and including the token that ends the turn, is the answer. That token is found by rendering short conversations: it
is the first special token behind an answer. A template that shows none of this is refused; a conversation that it renders in another way
than its beginnings is refused as that one conversation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmworks.errors import UserError
from lmworks.tokenizer.chat import Template, render_marked, take_out, unlearn, unused_markers, with_thoughts
from lmworks.tokenizer.messages import Message

if TYPE_CHECKING:
    from lmworks.tokenizer.text_tokenizer import TextTokenizer

Encode = Callable[[str, str], tuple[list[int], list[int]]]
Range = tuple[int, int | None]  # characters; without an end: up to the token that ends the turn

_ANSWER, _LATER = "Qzx", "Wvy"  # words that no template has of its own
_USER = {"role": "user", "content": "Hi"}
_CALL: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": {"at": _ANSWER}}}]}  # fmt: skip
_RESULT = {"role": "tool", "name": "look", "tool_call_id": "call12345", "content": "here"}
_SYSTEM = {"role": "system", "content": "Hm"}


def _answer(text: str = _ANSWER) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class Turns:
    """The turns of a template: `stops` are the ids of the special tokens that end a turn of the assistant, and at which generation stops.

    Raises `UserError` if the template does not show which tokens the assistant writes.
    """

    def __init__(self, tokenizer: TextTokenizer, encode: Encode, eos_ids: Sequence[int], template: Template, where: str) -> None:
        """`encode` has, for marked text (see `lmworks.tokenizer.chat.encode_marked`), the ids and where each begins, in characters."""
        self._tokenizer, self._encode, self._template, self._where = tokenizer, encode, template, where
        self._tagged = self._has_spans()
        ends = [self._closing([_USER, _answer()]), self._closing([_USER, _answer(), _USER])]
        ends += [end for after in ([], [_RESULT]) if (end := self._try_closing([_USER, _CALL, *after])) is not None]
        found = {end for end in ends if end is not None}
        if not found:
            raise UserError(f"{where} ends no answer with a special token, so a tuned model could not learn to stop; use another template")
        self.stops: frozenset[int] = frozenset(found)
        self._all_stops = self.stops | set(eos_ids)
        breaks = (self._try_closing([_USER, _answer(), after]) for after in (_SYSTEM, _answer(_LATER)))
        self._breaks = {one for one in breaks if one is not None} - self._all_stops
        self._check()

    def encode(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, thinking: bool | None = None
    ) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and for each whether the assistant wrote it, the token that ends its turn included. If the template
        leaves the last answer open, the tokenizer's end-of-text token is appended.

        A token that begins in a prompt and reaches into an answer does not count as written, nor does an answer that is not `learned`, or a
        token with a part that is `untrained` (see `Message`). Raises `UserError` if the template refuses
        the conversation, or renders an answer's prompt otherwise than in the whole conversation.
        """
        found = self._template.checked(messages)
        marker, *marks = unused_markers(found, tools, 5)
        text, spans = self._spans(found, tools, thinking, marker, (marks[0], marks[1]), (marks[2], marks[3]))
        removed = marker + marks[2] + marks[3]
        ids, starts = self._encode(text, removed)
        mask, closed = [False] * len(ids), True
        answers = [message for message in found if message["role"] == "assistant"]
        if len(spans) != len(answers) and not all(message.learned for message in answers):
            raise UserError(f"{self._where} does not show each answer apart, so one that is not to be trained cannot be told")
        for number, (begin, end) in enumerate(spans):
            first, last = (_without(text, position, removed) for position in (begin, len(text) if end is None else end))
            learned = len(spans) != len(answers) or answers[number].learned
            closed = self._fill(mask, ids, starts, first, last, tagged=end is not None, learned=learned)
        for begin, end in take_out(text, (marks[2], marks[3]), removed)[1]:
            unlearn(mask, starts, begin, end)
        if found[-1]["role"] == "assistant" and spans and not closed:
            ids.append(self._tokenizer.eos_id)
            mask.append(found[-1].learned)
        return ids, mask

    def _fill(self, mask: list[bool], ids: list[int], starts: list[int], begin: int, end: int, tagged: bool, learned: bool) -> bool:
        """Mark one answer, if it is `learned`; returns whether a stop token ends it."""
        at = bisect_left(starts, begin)
        first = at
        while at < len(ids) and starts[at] < end and not (not tagged and ids[at] in self._breaks):
            mask[at] = learned
            if not tagged and ids[at] in self._all_stops:
                return True
            at += 1
        if at > first and ids[at - 1] in self._all_stops:
            return True
        if tagged and at < len(ids) and ids[at] in self._all_stops:  # a block that ends before the token at which generation stops
            mask[at] = learned
            return True
        return at < len(ids)

    def _spans(
        self, messages: list[Message], tools: Sequence[dict[str, Any]] | None, thinking: bool | None, marker: str, marks: tuple[str, str],
        untrained: tuple[str, str],
    ) -> tuple[str, list[Range]]:  # fmt: skip
        """The rendered conversation, and where the assistant's answers are in it."""
        if self._tagged:
            text = render_marked(self._tokenizer, self._template, messages, marker, tools, False, thinking, marks, untrained)
            found, inside = take_out(text, marks)
            return found, [*inside]
        text = render_marked(self._tokenizer, self._template, messages, marker, tools, False, thinking, untrained=untrained)
        spans: list[Range] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if not number:
                raise UserError("the conversation begins with an answer, to which there is no prompt")
            # many templates leave the thoughts of earlier answers out once the user has spoken again
            befores = (messages[:number], [_without_thoughts(one) for one in messages[:number]])
            for think in (False, thinking) if message.silent else (thinking,):
                prompts = (render_marked(self._tokenizer, self._template, one, marker, tools, True, think, untrained=untrained)
                           for one in befores)  # fmt: skip
                if (prompt := next((one for one in prompts if text.startswith(one)), None)) is not None:
                    spans.append((len(prompt), None))
                    break
            else:
                raise UserError(f"{self._where} renders the prompt of message {number + 1} otherwise than in the whole conversation, so "
                                "the tokens that the assistant wrote cannot be told")  # fmt: skip
        return text, spans

    def _has_spans(self) -> bool:
        """Whether the template marks answers itself. This first rendering also finds a template that hangs or fails."""
        begin, end = unused_markers([], self._template.tools, 2)
        return begin in self._template.render([_USER, _answer()], self._template.tools, generation=(begin, end))

    def _closing(self, messages: list[dict[str, Any]]) -> int | None:
        """The first special token behind the answer that contains `_ANSWER`."""
        text = self._template.render(messages, self._template.tools)
        _, found, rest = text.rpartition(_ANSWER)
        parts = self._tokenizer.split_special(rest) if found else []
        return self._tokenizer.special[parts[1]] if len(parts) > 1 else None

    def _try_closing(self, messages: list[dict[str, Any]]) -> int | None:
        try:
            return self._closing(messages)
        except UserError:  # many templates refuse tools, a second system message, or two answers in a row
            return None

    def _check(self) -> None:
        """Raise `UserError` unless the mask of a short conversation is exactly its answers."""
        ids, mask = self.encode([_USER, _answer(), _USER, _answer(_LATER)], self._template.tools)
        written = [one for one, spoken in zip(ids, mask, strict=True) if spoken]
        text = self._tokenizer.decode(written)
        turns = sum(spoken and not before for before, spoken in zip([False, *mask], mask, strict=False))
        one_each = turns == 2 and text.count(_ANSWER) == 1 and text.count(_LATER) == 1
        if not one_each or _USER["content"] in text or not written or written[-1] not in self._all_stops:
            raise UserError(f"{self._where} does not show which tokens the assistant writes (of two answers in a conversation it shows "
                            f"{text!r}), so a model cannot be tuned with it; use another template")  # fmt: skip


def _without_thoughts(message: Message) -> Message:
    return with_thoughts(message).saying(reasoning_content=None) if message["role"] == "assistant" else message


def _without(text: str, position: int, removed: str) -> int:
    """A position in `text` without the characters `removed`."""
    return position - sum(text.count(one, 0, position) for one in removed)
