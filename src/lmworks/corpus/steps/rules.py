"""The step `rules`: heuristic quality by domain and language; see `lmworks.corpus.rules`."""

from __future__ import annotations

from collections.abc import Sequence

from lmworks.corpus.document import Batch, Drop, Outcome, Step
from lmworks.corpus.rules import Text, judge, rules_for
from lmworks.corpus.steps import Context
from lmworks.recipe.steps import Rules


class _Judge:
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()

    def __init__(self, context: Context) -> None:
        self.name = "rules"
        self._rules = rules_for(context.source.rules, context.source.domain, context.source.language)

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for index, document in enumerate(batch.documents):
            python = document.origin.endswith((".py", ".pyi"))
            reason = judge(Text.of(batch.units, index, document.text, python), self._rules)
            outcomes.append(document if reason is None else Drop(reason))
        return outcomes


def make(node: Rules, context: Context) -> Step:
    """The rules of the source."""
    return _Judge(context)
