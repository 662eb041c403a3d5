"""RULER's question answering: the documents that answer a question among others (arXiv:2404.06654, section 3.4)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from lmworks.evaluate.generation.ruler.documents import Asked, Library
from lmworks.evaluate.generation.ruler.drafts import Draft

_INSTRUCTION = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


@dataclass(frozen=True)
class Answering:
    """Questions of a library, each item with one drawn at random.

    Documents are added until the length is reached, first those that are related to the gold ones, then others. The last one ends after any
    of its sentences. If all are used, they are repeated.
    """

    library: Callable[[str | None], Library]

    def __call__(self, rng: Random, length: int, folder: str | None) -> tuple[Draft, ...]:
        library = self.library(folder)
        asked = rng.choice(library.questions)
        others = _others(rng, library, asked)
        gold = [(rng.random(), library.documents[number]) for number in asked.gold]
        # where a document stands depends on neither the size nor the documents that come later
        added = [(rng.random(), _sentences(library.documents[number])) for number in others]
        total = sum(len(sentences) for _, sentences in added)

        def render(size: int) -> str:
            shown = list(gold)
            whole, left = divmod(size, total) if total else (0, 0)
            shown += [(place, "".join(sentences)) for place, sentences in added] * whole
            for place, sentences in added:
                if left <= 0:
                    break
                shown.append((place, "".join(sentences[:left]).rstrip()))
                left -= len(sentences)
            shown.sort()
            context = "\n\n".join(f"Document {number}:\n{document}" for number, (_, document) in enumerate(shown, 1))
            return (
                f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{context}\n\n{_INSTRUCTION}\n\nQuestion: {asked.question}"
            )

        return (Draft(render, " Answer:", asked.answers, least=0, most=None if total else 0),)


def _others(rng: Random, library: Library, asked: Asked) -> list[int]:
    related = rng.sample(asked.related, len(asked.related))
    rest = sorted(set(range(len(library.documents))) - {*asked.gold, *related})
    return [*related, *rng.sample(rest, len(rest))]


def _sentences(document: str) -> list[str]:
    """The sentences of a document, with the spaces behind them."""
    return re.findall(r".+?(?:[.!?][\"')\]]{0,3}\s+|$)", document, re.DOTALL) or [document]
