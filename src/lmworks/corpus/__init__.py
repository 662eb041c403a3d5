"""Raw text to clean documents: `prepare` makes the corpus of a recipe, `table` shows the funnel of documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmworks.corpus.pipeline import prepare
    from lmworks.corpus.report import Report, table

__all__ = ["Report", "prepare", "table"]


def __getattr__(name: str) -> Any:
    """Import on first use: pyarrow and numpy are not needed to show a recipe."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lmworks.corpus.pipeline" if name == "prepare" else "lmworks.corpus.report"), name)
