"""Lists the files of sources and evaluation sets with sizes and times, to detect added and changed files.

Sources that are pinned (wheels), part of Python, or on a hub are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator

from lmworks.corpus.readers import parts
from lmworks.errors import UserError
from lmworks.progress import bar
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tree.fingerprint import Change

Listing = dict[str, dict[str, list[int]]]
"""Recipe path of a source to files to numbers that change with their contents."""

_ELSEWHERE = ("wheel", "stdlib", "huggingface")
_WHOLE = 1 << 62


def list_files(recipe: Recipe, before: Listing) -> Listing:
    """The current files. A source that cannot be listed now keeps its listing of `before`, because a finished corpus does not need it."""
    sources = {f"corpus.sources.{source.name}": source for source in recipe.corpus.sources if source.kind not in _ELSEWHERE}
    sources |= {f"evaluate.protect.{own.name}": own.source for own in recipe.evaluate.protect}
    found: Listing = {}
    with bar("list sources", len(sources)) as progress:
        for name, source in sources.items():
            try:
                files = [file for part in parts(source, _WHOLE) for file in part.as_json()["files"]]
                found[name] = {str(path): list(rest) for path, *rest in files}
            except UserError:
                if name in before:
                    found[name] = before[name]
            progress.advance()
    return found


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
