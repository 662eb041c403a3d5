"""Whether the sources hold enough text for the token budgets, as far as this is known before the corpus is made."""

from __future__ import annotations

from pathlib import Path

from lmworks.corpus.readers.snapshot import list_files
from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.format.manifest import MANIFEST, Manifest
from lmworks.shards.order.order import Order

_PLAIN = ("text", "markdown", "jsonl", "html", "latex", "code", "notebook")  # kinds whose files are no smaller than their text
_PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".parquet")
_BYTES_PER_TOKEN = 2  # of any language and tokenizer rather more; so what is called too little is too little
_PLENTY = 1 << 60  # tokens of a source that cannot be looked at


def text_shortage(recipe: Recipe, run_dir: Path) -> str | None:
    """The sources with too little text, judged by the token files of the run or, before they exist, by the file sizes of the sources;
    None if no shortage is known."""
    if recipe.time is not None or not recipe.train.phases:
        return None
    try:
        made = (run_dir / "shards" / MANIFEST).exists()
        Order(recipe, _at_most(recipe) | (Manifest.load(run_dir / "shards").train_tokens() if made else {}))
    except UserError as error:
        return str(error)
    return None


def _at_most(recipe: Recipe) -> dict[str, int]:
    found = list_files(recipe, {})
    tokens = dict.fromkeys(recipe.shards.imported, _PLENTY)
    for source in recipe.corpus.sources:
        files = found.get(f"corpus.sources.{source.name}", {}) if source.kind in _PLAIN else {}
        packed = not files or any(name.endswith(_PACKED) for name in files)
        size = _PLENTY if packed else sum(size for size, *_ in files.values()) // _BYTES_PER_TOKEN
        tokens |= dict.fromkeys(source.outputs, size)
    return tokens
