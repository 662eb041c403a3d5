"""The user's own files that a run reads: text, evaluation sets, conversations, pairs, prompts, rewards. A change of them is found here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lmworks.corpus.readers import snapshot
from lmworks.corpus.readers.snapshot import Listing
from lmworks.errors import UserError
from lmworks.files import sha256_file
from lmworks.recipe.schema.recipe import Recipe
from lmworks.train.data.conversation_files import files_of


def list_files(recipe: Recipe, before: Listing) -> Listing:
    """The current files by recipe path: those of the corpus and the evaluation by size and time, those of tuning and alignment by contents,
    so that a copy of a run on another machine is not tuned again. Files that cannot be listed now keep their listing of `before`."""
    found = snapshot.list_files(recipe, before)
    for name, path, file in _tuning_sets(recipe):
        try:
            paths = [*(files_of(name, Path(path)) if path else ()), *([Path(file)] if file else ())]
            found[name] = {str(one): [one.stat().st_size, int(sha256_file(one)[:12], 16)] for one in paths}
        except (UserError, OSError):
            if name in before:
                found[name] = before[name]
    return found


def _tuning_sets(recipe: Recipe) -> Iterator[tuple[str, str | None, str | None]]:
    """Recipe path of each set of conversations, pairs or prompts with files, the path of its rows, and the file of its reward."""
    for stage in ("tune", "dpo", "grpo"):
        for data in getattr(getattr(recipe, stage), "data", ()):
            path, file = data.path if data.kind == "files" else None, getattr(data, "file", None)
            if path or file:
                yield f"{stage}.data.{data.name}", path, file
