"""Items in the three forms: as text that the model continues, or as messages for a chat model.

cloze: the text of each choice is a continuation of the question, and no letters are shown. letters: the choices are listed with letters,
and the letter is the continuation. free: as letters, but the reply is generated and read. Worked examples stand before the question in
the same form, with their answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lmworks.evaluate.items import LETTERS, ChoiceItem, Form, Item, OpenItem
from lmworks.evaluate.sets.choice_set import ANSWER

SHOTS: dict[Form, int] = {"cloze": 0, "letters": 5, "free": 0}
"""Worked examples where none are asked for: letters need to be shown; a chat model is asked as a user would ask it."""
_SEPARATOR = "\n\n"
_BY_LETTER = "Answer with the letter of the right choice."


def cloze(item: ChoiceItem, examples: Sequence[ChoiceItem]) -> ChoiceItem:
    """The item with worked examples before each context."""
    shown = "".join(one.contexts[one.answer] + one.continuations[one.answer] + _SEPARATOR for one in examples)
    return replace(item, contexts=tuple(shown + context for context in item.contexts)) if shown else item


def letters(item: ChoiceItem, examples: Sequence[ChoiceItem]) -> ChoiceItem:
    """The item whose continuations are the letters of the choices, in the format of OLMES (arXiv:2406.08446)."""
    shown = "".join(f"{_listed(one)}{ANSWER} {LETTERS[one.answer]}{_SEPARATOR}" for one in examples)
    context = _preamble(item) + shown + _listed(item) + ANSWER
    count = len(item.choices)
    return replace(item, contexts=(context,) * count, continuations=tuple(f" {letter}" for letter in LETTERS[:count]))


def free_text(item: Item, examples: Sequence[Item]) -> str:
    """A prompt for a model that knows no chat."""
    shown = "".join(f"{_asked(one)}{ANSWER} {_answer(one)}{_SEPARATOR}" for one in examples)
    return _preamble(item) + shown + _asked(item) + ANSWER


def free_messages(item: Item, examples: Sequence[Item]) -> list[dict[str, Any]]:
    """A conversation in which the item is the last question, for a chat model."""
    messages: list[dict[str, Any]] = []
    for one in examples:
        messages += [{"role": "user", "content": _request(one)}, {"role": "assistant", "content": _answer(one)}]
    messages.append({"role": "user", "content": _request(item)})
    messages[0]["content"] = _preamble(item) + messages[0]["content"]
    return messages


def _listed(item: ChoiceItem) -> str:
    return item.question + "".join(f"\n {letter}. {choice}" for letter, choice in zip(LETTERS, item.choices, strict=False))


def _asked(item: Item) -> str:
    return _listed(item) if isinstance(item, ChoiceItem) else item.question


def _request(item: Item) -> str:
    return f"{_listed(item)}\n{_BY_LETTER}" if isinstance(item, ChoiceItem) else item.question.removeprefix("Question: ")


def _answer(item: Item) -> str:
    return item.answers[0] if isinstance(item, OpenItem) else LETTERS[item.answer]


def _preamble(item: Item) -> str:
    return item.preamble + _SEPARATOR if item.preamble else ""
