"""Checks of the sources and the steps of a recipe before anything is read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from lmworks.corpus.readers import parts, passed_over
from lmworks.corpus.rules import rules_for
from lmworks.errors import Unavailable, UserError, all_refusals
from lmworks.recipe.schema.recipe import Recipe

_ELSEWHERE = ("wheel", "stdlib", "huggingface")  # not checked: pinned, part of Python, or remote
_WHOLE = 1 << 62


def refusals(recipe: Recipe, folder: Path) -> Iterator[UserError]:
    """Everything for which the corpus stage could not begin: sources that are not here, rules, facts and files that the steps need,
    packages, and the executor. `folder` is that of the recipe. Wheels and datasets are not downloaded."""
    from lmworks.corpus.dedup.semantic import embedding
    from lmworks.corpus.engine.job import Job
    from lmworks.corpus.engine.passes.reading import missing_facts
    from lmworks.corpus.pipeline import check_sources

    corpus = recipe.corpus
    if not corpus.sources and not recipe.trains_base:
        return
    yield from all_refusals([partial(check_sources, corpus)])
    yield from map(UserError, faults(recipe))
    yield from missing_facts(Job(recipe, folder, folder, {source.name: () for source in corpus.sources}, {}, ""))
    if corpus.dedup.semantic is not None:
        yield from all_refusals([partial(embedding, corpus.dedup.semantic, folder)])
    if corpus.executor.kind == "slurm" and shutil.which("sbatch") is None:
        yield UserError("corpus.executor kind slurm needs sbatch, which is not on this machine; run this on a login node")


def left_out(recipe: Recipe) -> Iterator[str]:
    """One line per source of which a folder has files that are not read. Of sources that are here."""
    for source in recipe.corpus.sources:
        if source.kind not in _ELSEWHERE:
            with suppress(UserError, OSError):
                if said := passed_over(source):
                    yield f"source {source.name}: {said}"


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
        except Unavailable as error:
            if not getattr(source, "optional", False):
                yield f"{error}; or set optional: true to continue without it"
        except UserError as error:
            yield str(error)
