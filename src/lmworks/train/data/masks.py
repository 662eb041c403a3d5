"""Which tokens of a conversation are trained on: which answers and thoughts; then token ids with a mask, cut to length, and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from lmworks.errors import UserError
from lmworks.recipe.schema.tune import ChatData, Thoughts
from lmworks.tokenizer.chat import begin_of_thoughts, with_thoughts
from lmworks.tokenizer.messages import Message, Span, normal
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.data.row_columns import NoRow

Messages = list[Message]
Cut = Literal["", "turn", "answer"]


def examples(messages: Messages, tools: list[dict[str, object]] | None, data: ChatData, tokenizer: Tokenizer, noted: Counter[str],
             ) -> Iterator[Messages]:  # fmt: skip
    """A conversation as it is trained: as a whole, or each answer with what comes before it (`answers: each`), as the server renders it.

    `noted` counts what is not trained. Raises `NoRow` if nothing of it can be, and `UserError`.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise NoRow("no answer")
    end = max(at for at, message in enumerate(messages, 1) if message["role"] == "assistant")
    found = [_without_empty(message, data, noted) if message["role"] == "assistant" else message for message in messages[:end]]
    places = [at for at, message in enumerate(found) if message["role"] == "assistant" and message.learned]
    if not places:
        raise NoRow("nothing to train: no answer is marked to be trained, or all are empty")
    noted["with turns at the end that nobody answers, which are left out"] += int(end < len(messages))
    if data.answers == "all":
        yield _with_thoughts(found, tools, data.thoughts, tokenizer, noted)
        return
    for place in places if data.answers == "each" else places[-1:]:
        if data.answers == "each" and _goes_on(found, place):
            continue  # a call is trained with the answer after its results, of which it is a part
        first = max((at for at in range(place) if found[at]["role"] == "user"), default=-1) if data.answers == "each" else place - 1
        before = enumerate(found[: place + 1])
        only = [one.having(learned=False) if one["role"] == "assistant" and at <= first else one for at, one in before]
        yield _with_thoughts(only, tools, data.thoughts, tokenizer, noted)


def _goes_on(messages: Messages, place: int) -> bool:
    """Whether an answer is a call, and one that is trained follows its results."""
    rest = messages[place + 1 :]
    size = next((at for at, one in enumerate(rest) if one["role"] == "user"), len(rest))
    return bool(rest) and rest[0]["role"] == "tool" and any(one["role"] == "assistant" and one.learned for one in rest[:size])


def _without_empty(message: Message, data: ChatData, noted: Counter[str]) -> Message:
    if data.empty_answers == "train" or not message.learned or not message.empty:
        return message
    noted["empty answers, not trained"] += 1
    return message.having(learned=False)


def _with_thoughts(messages: Messages, tools: list[dict[str, object]] | None, options: Thoughts, tokenizer: Tokenizer, noted: Counter[str],
                   ) -> Messages:  # fmt: skip
    """A conversation with the switches of `thoughts`."""
    if options.history == "drop":
        last = max((at for at, one in enumerate(messages) if one["role"] == "user"), default=-1)
        messages = [_stripped(one) if one["role"] == "assistant" and at < last else one for at, one in enumerate(messages)]
    if any(one["role"] == "assistant" and _thoughts(one) for one in messages):
        shown = tokenizer.apply_chat(messages, tools)
        hidden = [at for at, one in enumerate(messages) if one["role"] == "assistant" and _thoughts(one) not in shown]
        if hidden and options.history == "keep":
            messages = [_inline(one) if at in hidden else one for at, one in enumerate(messages)]
            shown = tokenizer.apply_chat(messages, tools)
            if any(_thoughts(messages[at]) not in shown for at in hidden):
                raise NoRow("thoughts that the chat template leaves out, against thoughts.history: choose template, or answers: each")
            hidden = []
        noted["thoughts that the chat template leaves out"] += len(hidden)
    if not options.train:
        noted["thoughts not trained"] += sum(one["role"] == "assistant" and one.learned and bool(_thoughts(one)) for one in messages)
        messages = [_unlearned(one) if one["role"] == "assistant" and _thoughts(one) else one for one in messages]
    if options.empty == "prompt":
        messages = [one.having(silent=True) if one["role"] == "assistant" and not _thoughts(one) else one for one in messages]
    return messages


def _thoughts(message: Message) -> str:
    return str(with_thoughts(message).get("reasoning_content") or "").strip()


def _stripped(message: Message) -> Message:
    return with_thoughts(message).saying(reasoning_content=None)


def _inline(message: Message) -> Message:
    """An answer with its thoughts in its text, for templates that have no field for them."""
    thoughts = str(message.get("reasoning_content") or "")
    return message.saying(content=f"<think>\n{thoughts}\n</think>\n\n{message['content']}", reasoning_content=None).having(untrained={})


def _unlearned(message: Message) -> Message:
    """An answer whose thoughts are not trained: their text, not the marks around it."""
    spans: dict[str, list[Span]] = {name: list(found) for name, found in message.untrained.items()}
    if isinstance(thoughts := message.get("reasoning_content"), str) and thoughts.strip():
        return message.having(untrained=spans | {"reasoning_content": [(0, len(thoughts))]})
    thoughts, content = _thoughts(message), str(message["content"])
    begin = begin_of_thoughts(content, thoughts)
    return message.having(untrained=spans | {"content": [*spans.get("content", []), (begin, begin + len(thoughts))]})


class Fitted(NamedTuple):
    """Ids (int64) and mask (bool) of a conversation, and what was cut: nothing, the turns behind an answer, or the end of an answer.
    `tokens` is the length of the whole conversation. `spoken` (bool) are the tokens of answers, trained or not."""

    ids: np.ndarray
    mask: np.ndarray
    cut: Cut
    tokens: int
    spoken: np.ndarray


def fit(messages: Any, tools: Any, tokenizer: Tokenizer, most: int) -> Fitted | None:
    """The longest beginning of the conversation that ends with an answer and has at most `most` tokens. If no answer fits, the beginning of
    the first one that is trained, without a token that ends it.

    None if not even a token of that fits. Raises UserError if the messages are no conversation.
    """
    if not isinstance(messages, list) or not (tools is None or isinstance(tools, list)):
        raise UserError("messages or tools is not a list")
    found = [normal(number, message) for number, message in enumerate(messages, 1)]
    whole, mask = tokenizer.encode_chat(found, tools)
    spoken = _spoken(found, tools, tokenizer, mask)
    if len(whole) <= most:
        return _fitted(whole, mask, "", len(whole), spoken)
    # Where each answer ends in the whole. A beginning may be longer than that says, for its last thoughts are shown (see the template).
    ends = tokenizer.answer_ends(whole, spoken)
    answers = [number for number, message in enumerate(found, 1) if message["role"] == "assistant"]
    if len(ends) != len(answers):
        raise UserError("it is too long, and the chat template does not show the end of each answer")
    for number, end in sorted(zip(answers, ends, strict=True), reverse=True):
        if end <= most and _complete(found, number):
            ids, part = tokenizer.encode_chat(found[:number], tools)
            if len(ids) <= most and any(part):
                return _fitted(ids, part, "turn", len(whole), _spoken(found[:number], tools, tokenizer, part))
    trained = np.flatnonzero(mask[:most])
    if not trained.size or trained[-1] == 0:
        return None
    last = int(trained[-1]) + 1
    # an answer that ends here may be one that cannot stand alone, as a call with a result that does not fit
    cut: Cut = "turn" if whole[last - 1] in tokenizer.stop_ids else "answer"
    return _fitted(whole[:last], mask[:last], cut, len(whole), spoken[:last])


def _fitted(ids: list[int], mask: list[bool], cut: Cut, tokens: int, spoken: list[bool]) -> Fitted:
    return Fitted(np.array(ids), np.array(mask), cut, tokens, np.array(spoken))


def _spoken(messages: Messages, tools: Any, tokenizer: Tokenizer, mask: list[bool]) -> list[bool]:
    """The tokens of all answers of a conversation, whose trained ones are `mask`."""
    if all(message.learned and not message.untrained for message in messages):
        return mask
    return tokenizer.encode_chat([one.having(learned=True, untrained={}) for one in messages], tools)[1]


def pieces_of_text(segments: Sequence[tuple[str, bool]], tokenizer: Tokenizer, most: int, whole: bool) -> Iterator[Fitted]:
    """Texts without a template, each with whether it is trained, in pieces of at most `most` tokens, so that every token is the label of
    one. With `whole` the texts are a document: they begin and end as one, and nothing in them is a special token."""
    ids, mask = list(tokenizer.prefix if whole else ()), [False] * len(tokenizer.prefix if whole else ())
    for text, learned in segments:
        found = tokenizer.encode_parts([text]) if whole else tokenizer.encode_parts(tokenizer.split_special(text))
        ids, mask = [*ids, *found], [*mask, *[learned] * len(found)]
    if whole:
        ids, mask = [*ids, tokenizer.eos_id], [*mask, True]
    for start in range(0, max(len(ids) - 1, 1), most - 1):
        trained = np.array([False, *mask[start + 1 : start + most]], bool)
        yield Fitted(np.array(ids[start : start + most]), trained, "", len(ids), trained)


def _complete(messages: list[Message], number: int) -> bool:
    """Whether the first `number` messages can stand alone: a call at their end was the whole conversation's end."""
    return number == len(messages) or messages[number]["role"] != "tool"


@dataclass(frozen=True)
class MaskCheck:
    """What is wrong with a mask. `fault` refuses the conversation; `open_answers` are counted: answers before the last that end without a
    trained stop token because another message of the assistant or the system follows, where generation does not stop."""

    fault: str | None
    answers: int = 0
    open_answers: int = 0


def check_mask(
    ids: np.ndarray, mask: np.ndarray, stop_ids: Collection[int], ends: bool = True, spoken: np.ndarray | None = None
) -> MaskCheck:
    """Check that something is trained, that the first token (which is never a label) is not, and, if the last answer `ends` here, that it
    is whole: the last trained token ends the conversation's last answer and is a stop token. Parts of an answer may be trained: its tokens
    are those `spoken`, by default the trained ones.

    It knows the ids and the mask only, not the template, and so finds errors of the template and of its mask.
    """
    trained = np.flatnonzero(mask)
    if not trained.size:
        return MaskCheck("no token is trained")
    edges = np.diff(np.concatenate([[False], mask if spoken is None else mask | spoken, [False]]).astype(np.int8))
    first, last = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    learned = np.array([mask[begin : end + 1].any() for begin, end in zip(first, last, strict=True)])
    last = last[learned]
    closed = np.isin(ids[last], list(stop_ids)) & mask[last]
    answers, without = len(last), int((~closed[:-1]).sum())
    if ends and not closed[-1]:
        return MaskCheck(f"the stop token of the last answer is not trained: {int(last[-1]) + 1} of {len(ids)} tokens", answers, without)
    return MaskCheck(None, answers, without)


def has_special_text(messages: Any, tokenizer: Tokenizer) -> bool:
    """Whether a text of the conversation looks like a special token. It is encoded as text, so the model never sees the token itself."""
    return any(len(tokenizer.split_special(text)) > 1 for text in strings(messages))


def strings(value: Any) -> list[str]:
    """All texts in a conversation, except the roles."""
    found: list[str] = []
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, dict):
            stack.extend(reversed([item for name, item in one.items() if name != "role"]))
        elif isinstance(one, list | tuple):
            stack.extend(reversed(one))
    return found
