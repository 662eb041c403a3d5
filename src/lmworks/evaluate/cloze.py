"""Multiple-choice items answered by log-likelihood: the choice that the model finds likeliest per byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lmworks.evaluate.benchmarks import Item, chance_level, constant_level
from lmworks.evaluate.logprobs import Advance, LogProbs, Request
from lmworks.evaluate.statistics import Score

Norm = Literal["byte", "char", "none"]
NORMS: tuple[Norm, ...] = ("byte", "char", "none")


class Encoder(Protocol):
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
    """An item with the log-likelihood (nats) of each choice, and the tokens of its longest choice with context."""

    item: Item
    logprobs: tuple[float, ...]
    tokens: int = 0

    def scores(self, norm: Norm = "byte") -> list[float]:
        """Log-likelihood of each choice divided by its length, the space before it not counted."""
        texts = [continuation.removeprefix(" ") for continuation in self.item.continuations]
        lengths = {"byte": [len(text.encode()) for text in texts], "char": [len(text) for text in texts], "none": [1] * len(texts)}[norm]
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

    def to_json(self) -> dict[str, Any]:
        item = self.item
        return {"set": item.set, "id": item.id, "context": item.contexts[item.answer], "choices": [c.strip() for c in item.continuations]
                if len(set(item.continuations)) > 1 else list(item.contexts), "answer": item.answer, "picked": self.pick(),
                "correct": self.correct(), "margin": self.margin, "logprobs": list(self.logprobs), "per_byte": self.scores()}


def answer(items: Sequence[Item], encoder: Encoder, logprobs: LogProbs, advance: Advance | None = None) -> list[Answered]:
    """Score every choice of every item, all in one go so that rows of like length meet in a batch."""
    requests = [split_at_boundary(encoder, context, continuation)
                for item in items for context, continuation in zip(item.contexts, item.continuations, strict=True)]
    scored = iter(zip(logprobs(requests, advance), (len(context) + len(continuation) for context, continuation in requests), strict=True))
    answered = []
    for item in items:
        values, lengths = zip(*(next(scored) for _ in item.continuations), strict=True)
        answered.append(Answered(item, values, max(lengths)))
    return answered


def score(answered: Sequence[Answered], norm: Norm = "byte") -> Score:
    """Accuracy with the levels that guessing and the best constant answer reach on the same items."""
    items = [a.item for a in answered]
    chance = chance_level(items)
    return Score(sum(a.correct(norm) for a in answered), len(answered), chance, max(chance, constant_level(items)))


def score_sets(answered: Sequence[Answered], norm: Norm = "byte") -> Score:
    """All sets together, each item counting once. The baseline is that of always giving each set its best constant answer."""
    sets: dict[str, list[Answered]] = {}
    for a in answered:
        sets.setdefault(a.item.set, []).append(a)
    parts = [score(part, norm) for part in sets.values()]
    n = sum(part.n for part in parts)
    return Score(sum(p.correct for p in parts), n, sum(p.chance * p.n for p in parts) / n, sum(p.baseline * p.n for p in parts) / n)


def notable(answered: Sequence[Answered], each: int = 10) -> list[Answered]:
    """The `each` items that failed by most and the `each` that were right by most, worst first, for `items.jsonl`."""
    ranked = sorted(answered, key=lambda a: (a.margin, a.item.id))
    return ranked if len(ranked) <= 2 * each else ranked[:each] + ranked[-each:]
