"""Items in the three forms, and their answers by log-likelihood in two of them (`free` reads generated replies).

cloze: the text of each choice is a continuation of the question, and no letters are shown. letters: the choices are listed with letters,
and the letter is the continuation. free: as letters, but the reply is generated and read. Worked examples stand before the question in
the same form, with their answers. In cloze and letter form the answer is the continuation that the model finds most likely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from lmworks.evaluate.logprobs import Advance, LogProbs, Request
from lmworks.evaluate.sets.choice_sets import ANSWER
from lmworks.evaluate.sets.items import LETTERS, ChoiceItem, Form, Item, OpenItem, chance_level, constant_level
from lmworks.evaluate.statistics import Score

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


Norm = Literal["byte", "char", "token", "none", "unconditional"]
NORMS: tuple[Norm, ...] = ("byte", "char", "token", "none", "unconditional")


class Encoder(Protocol):
    eos_id: int

    def encode(self, text: str) -> list[int]: ...


def split_at_boundary(encoder: Encoder, context: str, continuation: str) -> Request:
    """Token ids of context and continuation, as the model would meet them in running text.

    The joined text is encoded, because tokens of the two parts encoded apart may never stand side by side in training. The
    split lies where the joined ids stop agreeing with those of the context alone: a token that reaches over the boundary,
    and one that the merge has changed, is scored with the continuation. No text is lost or counted twice either way.
    """
    alone, joined = encoder.encode(context), encoder.encode(context + continuation)
    split = 0
    while split < min(len(alone), len(joined)) and alone[split] == joined[split]:
        split += 1
    split = min(max(split, 1), len(joined) - 1)  # at least one token on each side
    return joined[:split], joined[split:]


@dataclass(frozen=True)
class Answered:
    """An item with the log-likelihood (nats) and the number of tokens of each continuation.

    `unconditional` has the log-likelihoods without the question, empty if they were not computed; `prompt_tokens` is the length of the
    longest continuation with its context.
    """

    item: ChoiceItem
    logprobs: tuple[float, ...]
    tokens: tuple[int, ...] = ()
    unconditional: tuple[float, ...] = ()
    prompt_tokens: int = 0

    def scores(self, norm: Norm = "byte") -> list[float]:
        """The log-likelihood of each continuation under a normalization.

        byte, char, token: divided by its length, the space before it not counted. none: as it is. unconditional: minus its
        log-likelihood without the question (pointwise mutual information, as in OLMES, arXiv:2406.08446).
        """
        if norm == "unconditional":
            return [logprob - alone for logprob, alone in zip(self.logprobs, self.unconditional, strict=True)]
        texts = [continuation.removeprefix(" ") for continuation in self.item.continuations]
        lengths: Sequence[int] = {
            "byte": [len(text.encode()) for text in texts], "char": [len(text) for text in texts], "token": self.tokens,
            "none": [1] * len(texts),
        }[norm]  # fmt: skip
        return [logprob / max(1, length) for logprob, length in zip(self.logprobs, lengths, strict=True)]

    def pick(self, norm: Norm = "byte") -> int:
        """Index of the best choice; the first of equals."""
        scores = self.scores(norm)
        return scores.index(max(scores))

    def correct(self, norm: Norm = "byte") -> bool:
        return self.pick(norm) == self.item.answer

    @property
    def margin(self) -> float:
        """Nats per byte by which the right choice leads the best wrong one; negative is a failure."""
        scores = self.scores()
        return scores[self.item.answer] - max(score for i, score in enumerate(scores) if i != self.item.answer)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the right answer."""
        return -self.scores()[self.item.answer] / math.log(2)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The normalizations for which everything was computed."""
        return NORMS if self.unconditional else NORMS[:-1]

    def to_json(self) -> dict[str, Any]:
        item = self.item
        return {"set": item.set, "id": item.id, "context": item.contexts[item.answer], "choices": list(item.choices),
                "answer": item.answer, "picked": self.pick(), "correct": self.correct(), "margin": self.margin,
                "logprobs": list(self.logprobs), "per_byte": self.scores()}


def without_question(encoder: Encoder, context: str, continuation: str) -> Request:
    """The continuation after "Answer:" alone, or at the start of a document where the context does not end so."""
    if context.endswith(ANSWER):
        return split_at_boundary(encoder, ANSWER.strip(), continuation)
    return [encoder.eos_id], encoder.encode(continuation)


def requests_of(items: Sequence[ChoiceItem], encoder: Encoder) -> list[Request]:
    """A request for each continuation of each item, in order."""
    return [
        split_at_boundary(encoder, context, rest) for item in items for context, rest in zip(item.contexts, item.continuations, strict=True)
    ]


def answer(
    items: Sequence[ChoiceItem], encoder: Encoder, logprobs: LogProbs, advance: Advance | None = None, unconditional: bool = False
) -> list[Answered]:
    """Score every continuation of every item, all in one go so that rows of similar length share a batch.

    `advance` is called with the number of continuations done. `unconditional` also scores them without the question.
    """
    requests = requests_of(items, encoder)
    values = logprobs(requests, advance)
    alone: list[float] = []
    if unconditional:
        texts = [pair for item in items for pair in zip(item.contexts, item.continuations, strict=True)]
        alone = logprobs([without_question(encoder, *pair) for pair in texts])
    answered, start = [], 0
    for item in items:
        span = slice(start, start := start + len(item.continuations))
        lengths = [(len(context), len(rest)) for context, rest in requests[span]]
        answered.append(
            Answered(item, tuple(values[span]), tuple(rest for _, rest in lengths), tuple(alone[span]), max(map(sum, lengths)))
        )
    return answered


def score(answered: Sequence[Answered], norm: Norm = "byte") -> Score:
    """Accuracy with the levels that guessing and the best constant answer reach on the same items."""
    items = [a.item for a in answered]
    chance = chance_level(items)
    return Score(sum(a.correct(norm) for a in answered), len(answered), chance, max(chance, constant_level(items)))


def notable(answered: Sequence[Answered], each: int = 10) -> list[Answered]:
    """The `each` items that failed by most and the `each` that were right by most, worst first, for `items.jsonl`."""
    ranked = sorted(answered, key=lambda a: (a.margin, a.item.id))
    return ranked if len(ranked) <= 2 * each else ranked[:each] + ranked[-each:]
