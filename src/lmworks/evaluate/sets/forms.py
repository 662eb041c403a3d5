"""Items in the three forms, and their answers: by log-likelihood in two of them, out of a generated reply in the third.

cloze: the text of each choice is a continuation of the question, and no letters are shown. letters: the choices are listed with letters,
and the letter is the continuation. free: as letters, but the reply is generated and read. Worked examples stand before the question in
the same form, with their answers. In cloze and letter form the answer is the continuation that the model finds most likely.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from lmworks.evaluate.generation.interface import Failure, Prompt, Reply
from lmworks.evaluate.generation.replies import Answerer
from lmworks.evaluate.logprobs import Advance, LogProbs, Request
from lmworks.evaluate.sets.items import ANSWER, LETTERS, ChoiceItem, Form, Item, OpenItem, chance_level, constant_level
from lmworks.evaluate.statistics import Score
from lmworks.verify.marks import stated
from lmworks.verify.numbers import final_number

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
    shown = "".join(f"{_asked(one)} {LETTERS[one.answer]}{_SEPARATOR}" for one in examples)
    context = _preamble(item) + shown + _asked(item)
    count = len(item.choices)
    return replace(item, contexts=(context,) * count, continuations=tuple(f" {letter}" for letter in LETTERS[:count]))


def free_text(item: Item, examples: Sequence[Item]) -> str:
    """A prompt for a model that knows no chat."""
    shown = "".join(f"{_asked(one)} {_answer(one)}{_SEPARATOR}" for one in examples)
    return _preamble(item) + shown + _asked(item)


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
    """All that stands before the answer."""
    return _listed(item) + (item.cue or ANSWER) if isinstance(item, ChoiceItem) else item.question + item.cue


def _request(item: Item) -> str:
    return f"{_listed(item)}\n{_BY_LETTER}" if isinstance(item, ChoiceItem) else item.question.removeprefix("Question: ")


def _answer(item: Item) -> str:
    return item.answers[0] if isinstance(item, OpenItem) else LETTERS[item.answer]


def _preamble(item: Item) -> str:
    return item.preamble + _SEPARATOR if item.preamble else ""


Norm = Literal["byte", "char", "token", "none", "unconditional"]
NORMS: tuple[Norm, ...] = ("byte", "char", "token", "none", "unconditional")


class Encoder(Protocol):
    """A tokenizer: `encode` puts `prefix` before a text, and `start` is what a model reads before a text without a context."""

    @property
    def prefix(self) -> Sequence[int]: ...

    @property
    def start(self) -> Sequence[int]: ...

    def encode(self, text: str) -> list[int]: ...


def split_at_boundary(encoder: Encoder, context: str, continuation: str) -> Request:
    """Token ids of context and continuation, as the model would meet them in running text.

    The joined text is encoded, because tokens of the two parts encoded apart may never stand side by side in training. The
    split lies where the joined ids stop agreeing with those of the context alone: a token that reaches over the boundary,
    and one that the merge has changed, is scored with the continuation. No text is lost or counted twice either way. Where nothing is
    left of the context, the model reads `Encoder.start`.
    """
    if not context:
        start, ids = list(encoder.start), encoder.encode(continuation)
        return start, ids[len(start) :] if ids[: len(start)] == start else ids
    alone, joined = encoder.encode(context), encoder.encode(context + continuation)
    split = 0
    while split < min(len(alone), len(joined)) and alone[split] == joined[split]:
        split += 1
    split = min(max(split, 1), len(joined) - 1)  # at least one token on each side
    return joined[:split] or list(encoder.start), joined[split:]


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
    return split_at_boundary(encoder, "", continuation)


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


_MOST_TOKENS = 64  # of a reply
_STOP = ("\nQuestion:", "\n\n")  # a base model goes on to ask itself the next question; its answer is what comes before
_LETTER = re.compile(
    r"(?i:(?:the )?(?:correct |right |best )?(?:option|choice|letter)(?: is)?:? ?)?[(\[]?([A-Za-z])[)\]]?(?![\w'’-])"
)
_SECOND = re.compile(r" ?(?:,|/|&|\band\b|\bor\b) ?[(\[]?[A-HJ-Z](?![\w'’-])")  # a second letter after it
_WORD = re.compile(r"(?:[Aa]|I) [a-z]")  # "a dog" and "I think" begin with a word, and no letter


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


def answer_freely(
    items: Sequence[Item], shown: Sequence[Sequence[Item]], answerer: Answerer, advance: Advance | None = None
) -> list[Judged]:
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
    """The index of the choice that a text names: by its whole text, by its letter at the beginning, or by being the only one in it."""
    exact, plain, whole = [choice.strip() for choice in choices], [normal(choice) for choice in choices], normal(text)
    if exact.count(text.strip()) == 1:  # before letters: a choice may be a letter
        return exact.index(text.strip())
    if plain.count(whole) == 1 and not (len(whole) == 1 and whole.isascii() and whole.isalpha()):
        return plain.index(whole)
    text = unicodedata.normalize("NFKC", text)  # letters and parentheses of full width
    letter = _LETTER.match(text)
    if letter and not _WORD.match(text, letter.start(1)) and not _SECOND.match(text, letter.end()):
        index = LETTERS.find(letter[1].upper())
        if index < len(choices):
            return index
    named = [index for index, choice in enumerate(plain) if f" {choice} " in f" {whole} "]
    return named[0] if len(named) == 1 else None


_SIGNS = re.compile(r"(?<=\d)[.,:/*-](?=\d)|(?<![\w)])(?:-(?=\.?\d)|\.(?=\d))|(?<=[^\W\d])#")
"""Punctuation that changes what a text says: between digits, the sign or the point before a number, and the # of C#."""
_ARTICLES = ("a", "an", "the")


def normal(text: str) -> str:
    """Case-folded, without punctuation, articles and repeated spaces, as in SQuAD's evaluation (arXiv:1606.05250); a text of nothing else
    keeps them. What would make another answer of it stays: `_SIGNS`, signs of operations, and the vowel signs of Indic scripts."""
    words = _words(text)
    return " ".join(word for word in words if word not in _ARTICLES) or " ".join(words) or text.strip()


def _words(text: str) -> list[str]:
    text = "".join("-" if unicodedata.category(letter) == "Pd" or letter == "−" else letter for letter in text)
    text = unicodedata.normalize("NFC", text).casefold().replace("⁄", "/")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    signs = {sign.start() for sign in _SIGNS.finditer(text)}
    kept = (letter for at, letter in enumerate(text) if at in signs or letter in "^_" or _says_something(letter))
    return "".join(kept).split()


def _says_something(letter: str) -> bool:
    return letter.isspace() or unicodedata.category(letter)[0] in "LMN" or unicodedata.category(letter) == "Sm"


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
        return f" {normal(accepted)} " in f" {normal(found)} " if _words(accepted) else accepted in found
    return normal(found) == normal(accepted)


def score_freely(judged: Sequence[Judged]) -> Score:
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
