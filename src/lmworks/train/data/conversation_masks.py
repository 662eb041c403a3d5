"""A conversation as token ids with a mask of the tokens that are trained on: cut to length, and checked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.tokenizer.tokenizer import Tokenizer


def fit(messages: Any, tools: Any, tokenizer: Tokenizer, most: int) -> tuple[np.ndarray, np.ndarray, bool] | None:
    """Ids (int64) and mask (bool) of the longest beginning of the conversation that ends with an answer and has at most `most` tokens.

    Also whether anything was cut; None if no such beginning exists. Turns that nobody answers are no loss and always cut. Raises
    UserError if the messages are no conversation.
    """
    if not isinstance(messages, list) or not (tools is None or isinstance(tools, list)):
        raise UserError("messages or tools is not a list")
    whole, spoken = tokenizer.encode_chat(messages, tools)
    if len(whole) <= most and messages[-1]["role"] == "assistant":
        return np.array(whole), np.array(spoken), False
    # Where each answer ends in the whole. A beginning may be longer than that says, for its last thoughts are shown (see the template).
    ends = tokenizer.answer_ends(whole, spoken)
    answers = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
    if len(ends) != len(answers):
        raise UserError("it is too long, and the chat template does not show the end of each answer")
    for number, end in sorted(zip(answers, ends, strict=True), reverse=True):
        if end <= most and _complete(messages, number):
            ids, mask = tokenizer.encode_chat(messages[:number], tools)
            if len(ids) <= most:
                return np.array(ids), np.array(mask), True
    return None


def _complete(messages: list[dict[str, Any]], number: int) -> bool:
    """Whether the first `number` messages can stand alone: a call at their end was the whole conversation's end."""
    return number == len(messages) or messages[number]["role"] != "tool"


@dataclass(frozen=True)
class MaskCheck:
    """What is wrong with a mask. `fault` refuses the conversation; `open_answers` are counted: answers that end without a trained stop
    token because another message of the assistant or the system follows, where generation does not stop."""

    fault: str | None
    answers: int = 0
    open_answers: int = 0


def check_mask(ids: np.ndarray, mask: np.ndarray, stop_ids: Collection[int]) -> MaskCheck:
    """Check that something is trained, that the first token (which is never a label) is not, and that the last answer is whole: the last
    trained token ends the conversation's last answer and is a stop token.

    It knows the ids and the mask only, not the template, and so finds errors of the template and of its mask.
    """
    trained = np.flatnonzero(mask)
    if not trained.size:
        return MaskCheck("no token is trained")
    ends = np.flatnonzero(np.diff(np.append(mask, False).astype(np.int8)) == -1)
    closed = np.isin(ids[ends], list(stop_ids))
    answers, without = len(ends), int((~closed).sum())
    if not closed[-1]:
        return MaskCheck(f"the stop token of the last answer is not trained: {int(ends[-1]) + 1} of {len(ids)} tokens", answers, without)
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
