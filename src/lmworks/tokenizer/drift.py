"""Drift: the effect of new sources on the tokenizer's fertility on the others, measured by training without and with them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer.train import train

if TYPE_CHECKING:
    from rich.table import Table


def drift(recipe: Recipe, corpus_dir: Path, added: Sequence[str]) -> list[dict[str, Any]]:
    """Train the tokenizer of `recipe` without the sources `added` and with them; compare both on each held-out source and language.

    A row has `source`, `domain`, `language`, `added` (whether it is one of those), `fertility_before`, `fertility_after` and `change`,
    the relative change of the fertility: above 0 the text needs more tokens than before.
    """
    options = recipe.tokenizer.model_copy(update={"path": None})
    recipe = recipe.model_copy(update={"tokenizer": options})
    measured = []
    for leave_out in (added, ()):
        with tempfile.TemporaryDirectory() as folder:
            measured.append(train(recipe, corpus_dir, Path(folder), leave_out)["evaluation"])
    return [
        {"source": before["source"], "domain": before["domain"], "language": before["language"], "added": before["source"] in added,
         "fertility_before": before["fertility"], "fertility_after": after["fertility"],
         "change": after["fertility"] / before["fertility"] - 1 if before["fertility"] else 0.0}
        for before, after in zip(*measured, strict=True)
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows of `drift` for the terminal."""
    from rich.table import Table

    shown = Table(title="Tokens per word before and after the new text", title_justify="left")
    for column in ("source", "domain", "language"):
        shown.add_column(column)
    for column in ("before", "after", "change"):
        shown.add_column(column, justify="right")
    for row in rows:
        name = f"{row['source']} (new)" if row["added"] else row["source"]
        shown.add_row(name, row["domain"], row["language"], f"{row['fertility_before']:.3f}", f"{row['fertility_after']:.3f}",
                      f"{100 * row['change']:+.1f}%")
    return shown
