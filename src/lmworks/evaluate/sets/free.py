"""Free answers: the model writes a reply, and the answer is read from it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmworks.evaluate.generation.interface import Failure, Prompt, Reply
from lmworks.evaluate.generation.replies import Answerer
from lmworks.evaluate.logprobs import Advance
from lmworks.evaluate.sets.forms import free_messages, free_text
from lmworks.evaluate.sets.items import LETTERS, ChoiceItem, Item, OpenItem
from lmworks.evaluate.statistics import Score
from lmworks.verify.marks import stated
from lmworks.verify.numbers import final_number

_MOST_TOKENS = 64  # of a reply
_STOP = ("\nQuestion:", "\n\n")  # a base model goes on to ask itself the next question; its answer is what comes before
_LETTER = re.compile(r"\(?([A-Za-z])\)?(?:[.):,;\s]|$)")


@dataclass(frozen=True)
class Judged:
    """An item with the reply to it, the answer that was read from it, and why it is not correct.

    no answer: the reply is empty. format: it states nothing that can be read as an answer; truncated: the same, and it reached the limit of
    tokens. wrong: the answer that was read is another one.
    """

    item: Item
    reply: Reply
    extracted: str | None
    failure: Failure | None

    @property
    def correct(self) -> bool:
        return self.failure is None

    def to_json(self) -> dict[str, Any]:
        item = self.item
        right = item.choices[item.answer] if isinstance(item, ChoiceItem) else item.answers[0]
        return {"set": item.set, "id": item.id, "question": item.question, "answer": right, "reply": self.reply.text,
                "extracted": self.extracted, "correct": self.correct, "failure": self.failure}


def answer(items: Sequence[Item], shown: Sequence[Sequence[Item]], answerer: Answerer, advance: Advance | None = None) -> list[Judged]:
    """Ask every item, with its worked examples `shown` before it, and judge the replies."""
    prompts = [
        Prompt(item.set, item.id, free_text(item, examples), tuple(free_messages(item, examples)), item, _MOST_TOKENS, _STOP)
        for item, examples in zip(items, shown, strict=True)
    ]
    return [judge(item, reply) for item, (reply,) in zip(items, answerer(prompts, advance=advance), strict=True)]


def judge(item: Item, reply: Reply) -> Judged:
    """Judge a reply. The answer is read from it without looking at the right one."""
    text = stated(reply.text)
    if isinstance(item, ChoiceItem):
        index = chosen(text, item.choices)
        found, right = None if index is None else LETTERS[index], index == item.answer
    else:
        found = _found(reply.text, text, item)
        right = found is not None and any(_agrees(found, one, item.metric) for one in item.answers)
    if found is None:
        return Judged(item, reply, None, "truncated" if reply.truncated else "format" if text else "no answer")
    return Judged(item, reply, found, None if right else "wrong")


def chosen(text: str, choices: Sequence[str]) -> int | None:
    """The index of the choice that a text names: by its letter at the beginning, by its whole text, or by being the only one in it."""
    plain = [normal(choice) for choice in choices]
    if normal(text) in plain:  # before letters: a choice may be a letter
        return plain.index(normal(text))
    letter = _LETTER.match(text)
    if letter and (index := LETTERS.find(letter[1].upper())) < len(choices):
        article = letter[1] in "aA" and re.match(r"[Aa] [a-z]", text)  # "a dog", not choice A
        if not article:
            return index
    words = f" {normal(text)} "
    named = [index for index, choice in enumerate(plain) if choice and f" {choice} " in words]
    return named[0] if len(named) == 1 else None


def normal(text: str) -> str:
    """Lower case, without punctuation, articles and repeated spaces, as in SQuAD's evaluation (arXiv:1606.05250)."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", re.sub(r"[^\w\s]", "", text.lower())).split())


def _found(reply: str, text: str, item: OpenItem) -> str | None:
    if item.metric != "number":
        return text or None
    found = final_number(reply)
    return found.text if found else None


def _agrees(found: str, accepted: str, metric: str) -> bool:
    if metric == "number":
        reply, wanted = final_number(found), final_number(accepted)
        return reply is not None and wanted is not None and reply.equals(wanted)
    if metric == "contains":
        return f" {normal(accepted)} " in f" {normal(found)} " if normal(accepted) else accepted in found
    return normal(found) == normal(accepted) if normal(accepted) else found == accepted


def score(judged: Sequence[Judged]) -> Score:
    """The share of correct replies. Chance and baseline of choices are those of their letters; of open questions, chance is 0 and the
    baseline the most frequent right answer."""
    n, correct = len(judged), sum(one.correct for one in judged)
    items = [one.item for one in judged]
    choices = [item for item in items if isinstance(item, ChoiceItem)]
    keys = [item.answer if isinstance(item, ChoiceItem) else normal(item.answers[0]) for item in items]
    most = Counter(keys).most_common(1)[0][1] if keys else 0
    chance = sum(1 / len(item.choices) for item in choices) / n if n else 0.0
    constant = most / n if n and (choices or most > 1) else 0.0
    return Score(correct, n, chance, max(chance, constant))


def failures(judged: Sequence[Judged]) -> dict[str, int]:
    """How many replies failed for each reason."""
    return dict(Counter(one.failure for one in judged if one.failure is not None))
