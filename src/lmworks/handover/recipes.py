"""The prompt files that the command names: JSONL files, or those of a recipe's tune.data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lmworks.errors import UserError


def prompt_files(given: Sequence[str]) -> list[Path]:
    """The JSONL files; a recipe stands for the JSONL files in its `tune.data`. Raises `UserError` for a recipe without any."""
    from lmworks.recipe.loading.load import load_recipe

    found: list[Path] = []
    for name in given:
        if not name.endswith((".yaml", ".yml")):
            found.append(Path(name))
            continue
        recipe = load_recipe(name, []).recipe
        files: list[Path] = []
        for source in recipe.tune.data if recipe.tune else ():
            if source.kind == "files" and source.path:
                path = Path(source.path)
                files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{name} has no tune.data of kind files; give a JSONL file with prompts and labels")
        found += files
    return found
