"""The prompts that the base model completes, during training and in the evaluation: the recipe's, or beginnings of held-out text."""

from __future__ import annotations

from pathlib import Path

from lmworks.documents import corpus_files
from lmworks.recipe.schema.recipe import Recipe

_MOST, _LENGTH = 4, 48  # beginnings, one of each domain; characters of each
_LOOKED_AT = 64  # documents of each file


def prompts(recipe: Recipe, corpus_dir: Path) -> tuple[str, ...]:
    """The prompts of `evaluate.prompts`, or by default fixed beginnings of held-out text."""
    if recipe.evaluate.prompts is not None:
        return recipe.evaluate.prompts
    import pyarrow.parquet as pq

    found: dict[str, str] = {}
    for path in (path for files in corpus_files(corpus_dir, "validation").values() for path in files):
        batch = next(pq.ParquetFile(path).iter_batches(_LOOKED_AT, columns=["text", "domain"]), None)
        for text, domain in zip(*(batch[name].to_pylist() for name in ("text", "domain")), strict=True) if batch is not None else ():
            if domain not in found and (begin := beginning(text)):
                found[domain] = begin
    return tuple(dict.fromkeys(found[domain] for domain in sorted(found)[:_MOST])) or ("The",)


def beginning(text: str) -> str:
    """The first words of a text, or characters if it has no spaces; empty for a text that is too short to continue."""
    text = text.strip()
    if len(text) < 2 * _LENGTH:
        return ""
    begin = text[: _LENGTH + 1]
    cut = max(begin.rfind(" "), begin.rfind("\n"))
    return begin[:cut] if cut > _LENGTH // 2 else begin[:_LENGTH]
