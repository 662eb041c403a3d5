"""Which tokens of a conversation the assistant writes, for a chat template of any kind.

Nothing is assumed about the names of special tokens. A template that has {% generation %} blocks says it itself. For any other, the
prompt of an answer is the conversation before it, rendered with the generation prompt. It must be a prefix of the whole conversation, and
what follows it, up to and including the token that ends the turn, is the answer. Three kinds of templates render it otherwise:

- Where thoughts of earlier answers are left out, or shown, once the user has spoken again, the prompt is compared from the text of the
  message before the answer on.
- Where the prompt opens a block of thoughts, the prompt that closes it (`enable_thinking` false) is tried too.
- Where an answer without thoughts has no such block, the prompt counts up to what it opens.

The token that ends a turn is found by rendering short conversations: it is the end-of-text token behind an answer, or else the first
special token there. One that is also inside of answers, as where thoughts are a message of their own, ends none: generation does not stop
at it, and an answer goes on up to the last one before the next message. A template that shows none of this is refused; a conversation that
it renders in another way than its beginnings is refused as that one conversation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmworks.errors import UserError
from lmworks.tokenizer.chat import Template, render_marked, take_out, tried_call, unlearn, unused_markers, with_thoughts
from lmworks.tokenizer.messages import Message, Span

if TYPE_CHECKING:
    from lmworks.tokenizer.text_tokenizer import TextTokenizer

Encode = Callable[[str, str], tuple[list[int], list[int]]]

_ANSWER, _LATER = "Qzx", "Wvy"  # words that no template has of its own
_USER = {"role": "user", "content": "Hi"}
_RESULT = {"role": "tool", "name": "look", "tool_call_id": "call12340", "content": "here"}
_SYSTEM = {"role": "system", "content": "Hm"}


def _answer(text: str = _ANSWER, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _calling(*values: str, **more: Any) -> dict[str, Any]:
    calls = [tried_call({"at": value}, number) for number, value in enumerate(values)]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


class Turns:
    """The turns of a template: `stops` are the ids of the special tokens that end a turn of the assistant, and at which generation stops.

    Raises `UserError` if the template does not show which tokens the assistant writes.
    """

    def __init__(self, tokenizer: TextTokenizer, encode: Encode, eos_ids: Sequence[int], template: Template, where: str) -> None:
        """`encode` has, for marked text (see `lmworks.tokenizer.chat.encode_marked`), the ids and where each begins, in characters."""
        self._tokenizer, self._encode, self._template, self._where = tokenizer, encode, template, where
        self._tagged = self._has_spans()
        self._opened = "" if self._tagged else self._find_opened()
        inside = self._inside()
        behind = [self._behind([_USER, _answer()]), self._behind([_USER, _answer(), _USER])]
        behind += [self._try_behind([_USER, _calling(_ANSWER), *after]) for after in ([], [_RESULT])]
        found = {end for one in behind if (end := _end(one, eos_ids, inside)) is not None}
        shared = {one[0] for one in behind if one} & inside
        if not (found or shared):
            raise UserError(f"{where} ends no answer with a special token, so a tuned model could not learn to stop; use another template")
        self.stops: frozenset[int] = frozenset(found or shared)
        self._all_stops = self.stops | set(eos_ids)
        self._inner = shared | (inside & self._all_stops)  # end answers, and parts of them
        breaks = (self._try_behind([_USER, _answer(), after]) for after in (_SYSTEM, _answer(_LATER)))
        self._breaks = {end for one in breaks if (end := _end(one, eos_ids, inside)) is not None} - self._all_stops
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
        shown = _Shown(self._tokenizer, self._template, self._template.checked(messages), tools, thinking, self._tagged)
        found, spans = shown.messages, shown.tagged if self._tagged else self._spans(shown)
        ids, starts = self._encode(shown.text, shown.markers)
        mask, closed = [False] * len(ids), True
        answers = [number for number, message in enumerate(found) if message["role"] == "assistant"]
        if len(spans) != len(answers) and not all(found[number].learned for number in answers):
            raise UserError(f"{self._where} does not show each answer apart, so one that is not to be trained cannot be told")
        for number, (begin, end) in enumerate(spans):
            first, last = bisect_left(starts, begin), bisect_left(starts, end)
            stop, closed = (self._block_end if self._tagged else self._answer_end)(ids, first, last)
            if not self._tagged and number + 1 < len(spans):
                self._require_end(shown, answers[number], begin, starts[stop - 1], closed or stop < last)
            mask[first:stop] = [len(spans) != len(answers) or found[answers[number]].learned] * (stop - first)
            closed = closed or stop < len(ids)
        for begin, end in shown.untrained:
            unlearn(mask, starts, begin, end)
        if found[-1]["role"] == "assistant" and spans and not closed:
            ids.append(self._tokenizer.eos_id)
            mask.append(found[-1].learned)
        return ids, mask

    def _require_end(self, shown: _Shown, number: int, begin: int, end: int, found: bool) -> None:
        """Raise `UserError` if the answer with a number, which was taken to go from `begin` to the token at `end`, reaches into the message
        behind it, or up to the next answer (not `found`)."""
        after = shown.messages[number + 1]
        if after["role"] == "assistant":
            return
        content = after["content"] if isinstance(after["content"], str) else after["content"][-1]["text"]
        if content.strip() in shown.plain[begin:end] and (text_end := shown.text_end(number + 1)) is not None:
            found = found and end < text_end
        if not found:
            raise UserError(f"{self._where} ends message {number + 1} with no special token before the next message, so its end cannot be "
                            "told")  # fmt: skip

    def _block_end(self, ids: list[int], first: int, last: int) -> tuple[int, bool]:
        """Where a marked answer ends, and whether a stop token does it, which may be behind the marks."""
        end = last
        while end > first and self._tokenizer.token_bytes(ids[end - 1]).isspace():  # behind the token that ends the turn
            end -= 1
        if end > first and ids[end - 1] in self._all_stops:
            return end, True
        closed = last < len(ids) and ids[last] in self._all_stops
        return last + closed, closed

    def _answer_end(self, ids: list[int], first: int, last: int) -> tuple[int, bool]:
        """Where the answer ends that begins at `first`, and whether a stop token does it: the first one that is never inside of an answer,
        else the last one that may be. A token at which generation does not stop is not trained as an end."""
        inner = None
        for at in range(first, last):
            if ids[at] in self._inner:
                inner = at
            elif ids[at] in self._all_stops:
                return at + 1, True
            elif ids[at] in self._breaks:
                last = at
                break
        if inner is None:
            return last, False
        closed = ids[inner] in self._all_stops
        return inner + closed, closed

    def _spans(self, shown: _Shown) -> list[Span]:
        """Where the assistant's answers are in a conversation of a template without marks: up to the next answer, or up to the text of the
        message in between, if that must be known."""
        spans: list[Span] = []
        for number, message in enumerate(shown.messages):
            if message["role"] != "assistant":
                continue
            if not number:
                raise UserError("the conversation begins with an answer, to which there is no prompt")
            start = next(shown.starts(number, self._opened), None)
            if start is None:
                raise UserError(f"{self._where} renders the prompt of message {number + 1} otherwise than in the whole conversation, so "
                                "the tokens that the assistant wrote cannot be told; give tokenizer.chat_template a copy of it that has "
                                "{% generation %} and {% endgeneration %} around them")  # fmt: skip
            if spans:
                spans[-1] = (spans[-1][0], min(spans[-1][1], start))
            end: int | None = len(shown.plain)
            if self._inner and number + 1 < len(shown.messages) and shown.messages[number + 1]["role"] != "assistant":
                end = shown.text_end(number + 1)
            if end is None:
                raise UserError(f"{self._where} does not show message {number + 2} as it is, so the end of the answer before it cannot be "
                                "told")  # fmt: skip
            spans.append((start, end))
        return spans

    def _has_spans(self) -> bool:
        """Whether the template marks answers itself. This first rendering also finds a template that hangs or fails."""
        begin, end = unused_markers([], self._template.tools, 2)
        return begin in self._template.render([_USER, _answer()], self._template.tools, generation=(begin, end))

    def _find_opened(self) -> str:
        """What the generation prompt opens behind the header of an answer, as <think>, although an answer without thoughts may begin with
        its text; empty if it opens nothing."""
        prompt, bare = (self._template.render([_USER], self._template.tools, asked) for asked in (True, False))
        header = _common(prompt, bare)
        for after in ([], [_USER, _answer(_LATER)]):
            text = self._template.render([_USER, _answer(), *after], self._template.tools)
            size = _common(prompt, text)
            if header < size < len(prompt) and text.startswith(_ANSWER, size):
                return prompt[size:]
        return ""

    def _inside(self) -> set[int]:
        """The special tokens between two parts of an answer: its thoughts, its text, its calls."""
        found: set[int] = set()
        for answer in (_answer(reasoning_content=_LATER), _calling(_ANSWER, reasoning_content=_LATER), _calling(_ANSWER, content=_LATER),
                       _calling(_LATER, _ANSWER)):  # fmt: skip
            text = self._try_render([_USER, answer])
            first, second = text.find(_LATER), text.rfind(_ANSWER)
            if 0 <= first < second:
                found |= set(self._special_in(text[first:second]))
        return found

    def _behind(self, messages: list[dict[str, Any]]) -> list[int]:
        """The special tokens behind the answer that contains `_ANSWER`, up to the text of the message behind it."""
        _, found, rest = self._template.render(messages, self._template.tools).rpartition(_ANSWER)
        return self._special_in(rest.partition(messages[-1]["content"] or _ANSWER)[0]) if found else []

    def _try_behind(self, messages: list[dict[str, Any]]) -> list[int]:
        return self._behind(messages) if self._try_render(messages) else []

    def _try_render(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._template.render(messages, self._template.tools)
        except UserError:  # many templates refuse tools, a second system message, or two answers in a row
            return ""

    def _special_in(self, text: str) -> list[int]:
        return [self._tokenizer.special[name] for name in self._tokenizer.split_special(text)[1::2]]

    def _check(self) -> None:
        """Raise `UserError` unless the masks of short conversations are exactly their answers, also behind thoughts."""
        tools = self._template.tools
        self._require_answers(*self.encode([_USER, _answer(), _USER, _answer(_LATER)], tools), _ANSWER, _LATER)
        try:
            thoughtful = self.encode([_USER, _answer(reasoning_content="Hm")], tools)
        except UserError:  # conversations with thoughts are refused one by one
            return
        self._require_answers(*thoughtful, _ANSWER)

    def _require_answers(self, ids: list[int], mask: list[bool], *answers: str) -> None:
        written = [one for one, spoken in zip(ids, mask, strict=True) if spoken]
        text = self._tokenizer.decode(written)
        turns = sum(spoken and not before for before, spoken in zip([False, *mask], mask, strict=False))
        one_each = len(answers) in (1, turns) and all(text.count(answer) == 1 for answer in answers)
        if not one_each or _USER["content"] in text or not written or written[-1] not in self._all_stops:
            raise UserError(f"{self._where} does not show which tokens the assistant writes (of {len(answers)} answers in a conversation "
                            f"it shows {text!r}), so a model cannot be tuned with it; use another template, or a copy that has "
                            "{% generation %} and {% endgeneration %} around them")  # fmt: skip


class _Shown:
    """A conversation as a template renders it: `text`, with `markers` that are not its own, and `plain`, without them. Places are in
    characters of `plain`.

    tagged: what the template itself marks as written by the assistant, if it does
    untrained: what is not to be trained inside of answers
    """

    def __init__(
        self, tokenizer: TextTokenizer, template: Template, messages: list[Message], tools: Sequence[dict[str, Any]] | None,
        thinking: bool | None, tagged: bool,
    ) -> None:  # fmt: skip
        self.messages = messages
        self._tokenizer, self._template, self._tools, self._thinking = tokenizer, template, tools, thinking
        marker, begin, end, first, last, self._place = unused_markers(messages, tools, 6)
        self.markers = "".join((marker, begin, end, first, last, self._place))
        self._marker, self._around = marker, (first, last)
        whole = self._render(messages, False, thinking, (begin, end) if tagged else None)
        self.text, _ = take_out(whole, (begin, end))
        self.tagged = take_out(whole, (begin, end), self.markers)[1]
        self.untrained = take_out(self.text, self._around, self.markers)[1]
        self.plain = self._without_markers(self.text)

    def starts(self, number: int, opened: str) -> Iterator[int]:
        """Where the answer with a number may begin: behind each prompt that fits; the first is the best. `opened` is what the generation
        prompt may open in vain."""
        thinks: list[bool | None] = [self._thinking]
        if "enable_thinking" in self._template.source:
            first = [False, self._thinking] if self.messages[number].silent else [self._thinking, False]
            thinks = list(dict.fromkeys([*first, True]))
        befores = [self.messages[:number]]
        # many templates leave the thoughts of earlier answers out once the user has spoken again
        if (silent := [_without_thoughts(one) for one in befores[0]]) != befores[0]:
            befores.append(silent)
        for think in thinks:
            for before in befores:
                if self.text.startswith(prompt := self._render(before, True, think)):
                    yield len(self._without_markers(prompt))
        for before in befores if opened else ():
            if self.text.startswith(prompt := self._render(before, True, self._thinking).removesuffix(opened)):
                yield len(self._without_markers(prompt))
        if any(one["role"] == "assistant" for one in befores[0]):  # which may depend on what follows
            yield from self._starts_behind_text(number, thinks, opened)

    def _starts_behind_text(self, number: int, thinks: list[bool | None], opened: str) -> Iterator[int]:
        """As `starts`, where the prompts are equal only from the text of the message before the answer on."""
        if (place := self.text_end(number - 1)) is None:
            return
        before = [*self.messages[: number - 1], _ended(self.messages[number - 1], self._place)]
        prompts = {think: self._without_markers(self._render(before, True, think).rpartition(self._place)[2]) for think in thinks}
        for prompt in (*prompts.values(), prompts[self._thinking].removesuffix(opened)):
            if self.plain.startswith(prompt, place):
                yield place + len(prompt)

    def text_end(self, number: int) -> int | None:
        """Where the text of a message ends; None if it is not shown as it is, or more than once."""
        messages = [*self.messages[:number], _ended(self.messages[number], self._place), *self.messages[number + 1 :]]
        found = self._render(messages, False, self._thinking)
        once = found.count(self._place) == 1 and self._without_markers(found) == self.plain
        return len(self._without_markers(found.partition(self._place)[0])) if once else None

    def _render(self, messages: Sequence[Message], prompt: bool, thinking: bool | None, generation: tuple[str, str] | None = None) -> str:
        return render_marked(
            self._tokenizer, self._template, messages, self._marker, self._tools, prompt, thinking, generation, self._around
        )

    def _without_markers(self, text: str) -> str:
        return text.translate(str.maketrans("", "", self.markers))


def _end(behind: list[int], eos_ids: Sequence[int], inside: set[int]) -> int | None:
    """The token among those behind an answer that ends it: an end of the text, else the first that is not also inside of answers."""
    left = [one for one in behind if one not in inside]
    return next((one for one in left if one in eos_ids), left[0] if left else None)


def _ended(message: Message, mark: str) -> Message:
    """A message with `mark` at the end of its text. White space behind it stays there, for templates to strip."""
    content = message["content"]
    if isinstance(content, list):
        return message.saying(content=[*content[:-1], content[-1] | {"text": _marked(content[-1]["text"], mark)}])
    return message.saying(content=_marked(content, mark))


def _marked(text: str, mark: str) -> str:
    size = len(text.rstrip())
    return text[:size] + mark + text[size:]


def _without_thoughts(message: Message) -> Message:
    return with_thoughts(message).saying(reasoning_content=None) if message["role"] == "assistant" else message


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    return next((at for at, (first, second) in enumerate(zip(one, other, strict=False)) if first != second), min(len(one), len(other)))
