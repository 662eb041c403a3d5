"""The step `rules`: heuristic quality, by domain and language or by published sets; see `lmworks.corpus.rules`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from lmworks.corpus.document import Batch, Document, Outcome, Step
from lmworks.corpus.rules import Text, first_broken, rules_for
from lmworks.corpus.rules.published import c4, fineweb, gopher
from lmworks.corpus.rules.stop_words import STOP_WORDS
from lmworks.corpus.rules.tokens import Vocabulary
from lmworks.corpus.steps import Context
from lmworks.recipe.schema.text_steps import Rules


@lru_cache(maxsize=64)
def _vocabulary(language: str) -> Vocabulary:
    """What is known of a language's words goes from part to part; no decision depends on it."""
    return Vocabulary(STOP_WORDS.get(language, ()))


class _ByDomain:
    name = "rules"
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()

    def __init__(self, context: Context) -> None:
        self._source = context.source
        rules_for(self._source.rules, self._source.domain, self._source.language)

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for index, document in enumerate(batch.documents):
            python = document.origin.endswith((".py", ".pyi"))
            rules = rules_for(self._source.rules, document.domain, document.language)
            outcomes.append(first_broken(Text.of(batch.units, index, document.text, python), rules) or document)
        return outcomes


class _Published:
    name = "rules"
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()

    def __init__(self, node: Rules) -> None:
        self._sets = node.sets

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        outcomes: list[Outcome] = list(batch.documents)
        for language in dict.fromkeys(document.language for document in batch.documents):
            vocabulary = _vocabulary(language)
            places = [place for place, document in enumerate(batch.documents) if document.language == language]
            for place, outcome in zip(places, self._judge([batch.documents[place] for place in places], vocabulary), strict=True):
                outcomes[place] = outcome
        return outcomes

    def _judge(self, documents: Sequence[Document], vocabulary: Vocabulary) -> list[Outcome]:
        outcomes: list[Outcome] = list(documents)
        for name in self._sets:
            places = [place for place, outcome in enumerate(outcomes) if isinstance(outcome, Document)]
            alive = [outcome for outcome in outcomes if isinstance(outcome, Document)]
            texts = [document.text for document in alive]
            if name == "c4":
                judged: list[Outcome] = [
                    drop or document.with_text(text)
                    for document, (text, drop) in zip(alive, c4(texts, vocabulary), strict=True)
                ]
            else:
                rules = gopher if name == "gopher" else fineweb
                judged = [rules(words) or document for document, words in zip(alive, vocabulary.words(texts), strict=True)]
            for place, outcome in zip(places, judged, strict=True):
                outcomes[place] = outcome
        return outcomes


def make(node: Rules, context: Context) -> Step:
    """The published sets where the node names some, the rules of the source where not."""
    meant = not node.sources or context.source.name in node.sources
    return _Published(node) if node.sets and meant else _ByDomain(context)
