"""The step `rules`: heuristic quality filters, by domain and language or by published sets; see `lmworks.corpus.rules`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lmworks.corpus.document import Batch, Document, Outcome, Step
from lmworks.corpus.steps.base import Context, StepOptions

if TYPE_CHECKING:
    from lmworks.corpus.rules.tokens import Vocabulary
    from lmworks.recipe.schema.corpus import Source

RuleSet = Literal["gopher", "c4", "fineweb"]


class Rules(StepOptions):
    """Drop documents that the quality rules of their domain and language reject (`lmworks.corpus.rules`)."""

    step: Literal["rules"] = Field("rules", description="which step this is")
    sets: tuple[RuleSet, ...] = Field(
        (), description="published rule sets to apply exactly, in this order, instead of the rules of the domain; c4 also drops lines"
    )
    sources: tuple[str, ...] = Field((), description="sources to apply `sets` to; all when empty. Others use the rules of their domain")

    def make(self, context: Context) -> Step:
        """The published sets if the options name some for this source, otherwise the rules of its domain."""
        meant = not self.sources or context.source.name in self.sources
        return _Published(self) if self.sets and meant else _ByDomain(context)

    def warnings(self, sources: Sequence[Source]) -> Iterator[str]:
        """Published rules count words between spaces, which some languages do not have."""
        from lmworks.letters import SPACELESS_LANGUAGES

        counting = [name for name in self.sets if name in ("gopher", "c4")]
        for source in sources if counting else ():
            if source.language in SPACELESS_LANGUAGES and (not self.sources or source.name in self.sources):
                yield (
                    f"source {source.name}: {' and '.join(counting)} count words between spaces and drop nearly all text in "
                    f"{source.language}; let the step name its sources without this one"
                )


@lru_cache(maxsize=64)
def _vocabulary(language: str) -> Vocabulary:
    """The cache of a language's words is kept from part to part; no decision depends on it."""
    from lmworks.corpus.rules.stop_words import STOP_WORDS
    from lmworks.corpus.rules.tokens import Vocabulary

    return Vocabulary(STOP_WORDS.get(language, ()))


class _ByDomain:
    name = "rules"
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()

    def __init__(self, context: Context) -> None:
        from lmworks.corpus.rules import rules_for

        self._source = context.source
        rules_for(self._source.rules, self._source.domain, self._source.language)

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        from lmworks.corpus.rules import Text, first_broken, rules_for

        outcomes: list[Outcome] = []
        for index, document in enumerate(batch.documents):
            python = document.origin.endswith((".py", ".pyi"))
            rules = rules_for(self._source.rules, document.domain, self._language(batch, index))
            outcomes.append(first_broken(Text.of(batch.units, index, document.text, python), rules) or document)
        return outcomes


    @staticmethod
    def _language(batch: Batch, index: int) -> str:
        """The language by which a document is judged: a script without spaces is recognized where the language is not known."""
        from lmworks.corpus.rules.stop_words import STOP_WORDS
        from lmworks.letters import SPACELESS_LANGUAGES, main_language, spaceless_language

        document = batch.documents[index]
        language = main_language(document.language)
        single = batch.units.single[batch.units.bounds[index] : batch.units.bounds[index + 1]]
        if language in STOP_WORDS or language in SPACELESS_LANGUAGES or language == "code" or not len(single) or single.mean() <= 0.5:
            return language
        return spaceless_language(document.text)


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
            for place, outcome in zip(places, self._decide([batch.documents[place] for place in places], vocabulary), strict=True):
                outcomes[place] = outcome
        return outcomes

    def _decide(self, documents: Sequence[Document], vocabulary: Vocabulary) -> list[Outcome]:
        from lmworks.corpus.rules.published import c4, fineweb, gopher

        outcomes: list[Outcome] = list(documents)
        for name in self._sets:
            places = [place for place, outcome in enumerate(outcomes) if isinstance(outcome, Document)]
            alive = [outcome for outcome in outcomes if isinstance(outcome, Document)]
            texts = [document.text for document in alive]
            if name == "c4":
                decided: list[Outcome] = [
                    drop or document.with_text(text)
                    for document, (text, drop) in zip(alive, c4(texts, vocabulary), strict=True)
                ]
            else:
                rules = gopher if name == "gopher" else fineweb
                decided = [rules(words) or document for document, words in zip(alive, vocabulary.words(texts), strict=True)]
            for place, outcome in zip(places, decided, strict=True):
                outcomes[place] = outcome
        return outcomes
