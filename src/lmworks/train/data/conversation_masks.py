"""A conversation as token ids with a mask of the tokens that are trained on: cut to length, and checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from lmworks.errors import UserError
from lmworks.tokenizer.messages import Message, normal
from lmworks.tokenizer.tokenizer import Tokenizer


class Fitted(NamedTuple):
    """Ids (int64) and mask (bool) of a conversation, and what was cut: nothing, the turns behind an answer, or the end of an answer.
    `tokens` is the length of the whole conversation."""

    ids: np.ndarray
    mask: np.ndarray
    cut: Literal["", "turn", "answer"]
    tokens: int


def fit(messages: Any, tools: Any, tokenizer: Tokenizer, most: int) -> Fitted | None:
    """The longest beginning of the conversation that ends with an answer and has at most `most` tokens. If no answer fits, the beginning of
    the first one that is trained, without a token that ends it.

    None if not even a token of that fits. Turns that nobody answers are no loss and always cut. Raises UserError if the messages are no
    conversation.
    """
    if not isinstance(messages, list) or not (tools is None or isinstance(tools, list)):
        raise UserError("messages or tools is not a list")
    found = [normal(number, message) for number, message in enumerate(messages, 1)]
    whole, spoken = tokenizer.encode_chat(found, tools)
    if len(whole) <= most and found[-1]["role"] == "assistant":
        return Fitted(np.array(whole), np.array(spoken), "", len(whole))
    # Where each answer ends in the whole. A beginning may be longer than that says, for its last thoughts are shown (see the template).
    flagged = any(message.untrained or not message.learned for message in found)
    every = tokenizer.encode_chat([one.having(learned=True, untrained={}) for one in found], tools)[1] if flagged else spoken
    ends = tokenizer.answer_ends(whole, every)
    answers = [number for number, message in enumerate(found, 1) if message["role"] == "assistant"]
    if len(ends) != len(answers):
        raise UserError("it is too long, and the chat template does not show the end of each answer")
    for number, end in sorted(zip(answers, ends, strict=True), reverse=True):
        if end <= most and _complete(found, number):
            ids, mask = tokenizer.encode_chat(found[:number], tools)
            if len(ids) <= most and any(mask):
                return Fitted(np.array(ids), np.array(mask), "turn", len(whole))
    trained = np.flatnonzero(spoken[:most])
    if len(whole) <= most or not trained.size or trained[-1] == 0:
        return None
    last = int(trained[-1]) + 1
    return Fitted(np.array(whole[:last]), np.array(spoken[:last]), "answer", len(whole))


def pieces_of_text(segments: Sequence[tuple[str, bool]], tokenizer: Tokenizer, most: int, whole: bool) -> Iterator[Fitted]:
    """Texts without a template, each with whether it is trained, in pieces of at most `most` tokens, so that every token is the label of
    one. With `whole` the texts are a document: they begin and end as one, and nothing in them is a special token."""
    ids, mask = list(tokenizer.prefix if whole else ()), [False] * len(tokenizer.prefix if whole else ())
    for text, trained in segments:
        found = tokenizer.encode_parts([text]) if whole else tokenizer.encode_parts(tokenizer.split_special(text))
        ids, mask = [*ids, *found], [*mask, *[trained] * len(found)]
    if whole:
        ids, mask = [*ids, tokenizer.eos_id], [*mask, True]
    for start in range(0, max(len(ids) - 1, 1), most - 1):
        piece = np.array(ids[start : start + most]), np.array([False, *mask[start + 1 : start + most]], bool)
        yield Fitted(*piece, "", len(ids))


def _complete(messages: list[Message], number: int) -> bool:
    """Whether the first `number` messages can stand alone: a call at their end was the whole conversation's end."""
    return number == len(messages) or messages[number]["role"] != "tool"


@dataclass(frozen=True)
class MaskCheck:
    """What is wrong with a mask. `fault` refuses the conversation; `open_answers` are counted: answers that end without a trained stop
    token because another message of the assistant or the system follows, where generation does not stop."""

    fault: str | None
    answers: int = 0
    open_answers: int = 0


def check_mask(ids: np.ndarray, mask: np.ndarray, stop_ids: Collection[int], ends: bool = True) -> MaskCheck:
    """Check that something is trained, that the first token (which is never a label) is not, and, if the last answer `ends` here, that it
    is whole: the last trained token ends the conversation's last answer and is a stop token.

    It knows the ids and the mask only, not the template, and so finds errors of the template and of its mask.
    """
    trained = np.flatnonzero(mask)
    if not trained.size:
        return MaskCheck("no token is trained")
    last = np.flatnonzero(np.diff(np.append(mask, False).astype(np.int8)) == -1)
    closed = np.isin(ids[last], list(stop_ids))
    answers, without = len(last), int((~closed).sum())
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
