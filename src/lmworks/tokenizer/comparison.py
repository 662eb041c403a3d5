"""Comparisons of tokenizers by training them: several vocabulary sizes, and the drift that new sources cause.

Sizes need one training: the merges of a small vocabulary are the first merges of a large one. Drift is the effect of new sources on the
tokenizer's fertility on the others, measured by training without and with them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.errors import UserError
from lmworks.io.files import read_json
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer.evaluate import evaluate
from lmworks.tokenizer.opening import load
from lmworks.tokenizer.tokenizer_json import truncated
from lmworks.tokenizer.train import train

if TYPE_CHECKING:
    from rich.table import Table


def evaluate_sizes(directory: Path, documents: Path, sizes: Sequence[int], weights: Mapping[str, float]) -> list[dict[str, Any]]:
    """Evaluate the tokenizer of `directory`, truncated to each of `sizes`, on the held-out text of `documents`, weighted by source.

    A row has `entries`, `tokens_per_byte`, `bytes_per_token` and `fertility`. Sizes outside the possible range are omitted; `UserError` if
    none is left. The tokenizer must be one that lmworks trained.
    """
    path = Path(directory) / "tokenizer.json"
    spec = read_json(path)
    merges, symbols = len(spec["model"]["merges"]), len(spec["model"]["vocab"]) - len(spec["model"]["merges"])
    named = [token for token in spec["added_tokens"] if not token["content"].startswith("<|reserved_")]
    spec = spec | {"added_tokens": named}  # reserved tokens that fill up a vocabulary are not part of a smaller one
    smallest, largest = symbols + len(named), symbols + merges + len(named)
    fitting = sorted({size for size in sizes if smallest <= size <= largest})
    if not fitting:
        raise UserError(f"{path} can be cut to {smallest} to {largest} entries; none of the requested sizes is in this range")
    rows = []
    for size in fitting:
        with tempfile.TemporaryDirectory() as folder:
            cut = json.dumps(truncated(spec, size), ensure_ascii=False)
            (Path(folder) / "tokenizer.json").write_text(cut, encoding="utf-8")
            rows.append({"entries": size, **_mean(evaluate({"cut": load(Path(folder))}, documents), weights)})
    return rows


def _mean(measured: list[dict[str, Any]], weights: Mapping[str, float]) -> dict[str, float]:
    """The mean over the mixture: each source counts by its weight, not by the size of its held-out text."""
    held: dict[str, int] = {}
    for row in measured:
        held[row["source"]] = held.get(row["source"], 0) + row["bytes"]
    share = {source: weights.get(source, 0.0) / size for source, size in held.items() if size}
    total = sum(share[source] * size for source, size in held.items() if size)
    if not total:
        raise UserError("no source of the mixture has held-out text to measure on; raise corpus.validation_fraction")
    tokens = sum(share[row["source"]] * row["tokens"] for row in measured if row["bytes"]) / total
    words = sum(share[row["source"]] * row["tokens"] / row["fertility"] for row in measured if row["fertility"]) / total
    return {"tokens_per_byte": tokens, "bytes_per_token": 1 / tokens, "fertility": tokens / words if words else 0.0}


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
