"""Checks of the sources of a recipe before anything is read: missing files and unknown rules."""

from __future__ import annotations

from collections.abc import Iterator

from lmworks.corpus.readers import parts
from lmworks.corpus.rules import rules_for
from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe

_ELSEWHERE = ("wheel", "stdlib", "huggingface")  # not checked: pinned, part of Python, or remote
_WHOLE = 1 << 62


def faults(recipe: Recipe) -> Iterator[str]:
    """One line per fault. A recipe for another machine may name files that do not exist on this one."""
    for source in recipe.corpus.sources:
        try:
            rules_for(source.rules, source.domain, source.language)
        except UserError as error:
            yield f"source {source.name}: {error}"
    read = [source for source in recipe.corpus.sources if source.kind not in _ELSEWHERE]
    for source in (*read, *(own.source for own in recipe.evaluate.protect)):
        try:
            parts(source, _WHOLE)
        except UserError as error:
            yield str(error)
