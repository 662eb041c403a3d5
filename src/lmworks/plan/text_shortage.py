"""Whether the sources have enough text for the token budgets, as far as this is known before the corpus is prepared."""

from __future__ import annotations

from pathlib import Path

from lmworks.corpus.readers.snapshot import list_files
from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.format.manifest import MANIFEST, Manifest
from lmworks.shards.order.order import Order

_PLAIN = ("text", "markdown", "jsonl", "html", "latex", "code", "notebook")  # kinds whose files are at least as large as their text
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".parquet")
_BYTES_PER_TOKEN = 2  # fewer than with any real tokenizer, so that no shortage is reported wrongly
_UNLIMITED = 1 << 60  # tokens of a source whose size is unknown


def text_shortage(recipe: Recipe, run_dir: Path) -> str | None:
    """A message that names the sources with too little text, from the token files of the run or, before they exist, from the file sizes of
    the sources; None if no shortage is known."""
    if recipe.time is not None or not recipe.train.phases:
        return None
    try:
        made = (run_dir / "shards" / MANIFEST).exists()
        Order(recipe, _max_tokens(recipe) | (Manifest.load(run_dir / "shards").train_tokens() if made else {}))
    except UserError as error:
        return str(error)
    return None


def _max_tokens(recipe: Recipe) -> dict[str, int]:
    """An upper bound of the tokens of each source."""
    found = list_files(recipe, {})
    tokens = dict.fromkeys(recipe.shards.imported, _UNLIMITED)
    for source in recipe.corpus.sources:
        files = found.get(f"corpus.sources.{source.name}", {}) if source.kind in _PLAIN else {}
        unknown = not files or any(name.endswith(_COMPRESSED) for name in files)
        size = _UNLIMITED if unknown else sum(size for size, *_ in files.values()) // _BYTES_PER_TOKEN
        tokens |= dict.fromkeys(source.outputs, size)
    return tokens
