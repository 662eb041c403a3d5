"""Jupyter notebooks as text: Markdown cells unchanged, code cells in fences, and optionally their outputs."""

from __future__ import annotations

import json
from typing import Any

from lmworks.corpus.readers.items import Item, decode_document, quarantined

FORMATS = ("cells", "outputs")
_LONGEST_NAME = 40  # of a language, which is written before each cell


def text_of(data: bytes, origin: str, limit: int, consumed: int, outputs: bool) -> Item:
    """A notebook (format 3 or 4) as an item; `broken_json` or `not_a_notebook` if it is invalid."""
    raw = decode_document(data, origin, len(data), consumed)
    if raw.reason is not None:
        return raw
    try:
        notebook = json.loads(raw.text)
    except (ValueError, RecursionError):
        return quarantined("broken_json", origin, raw.text, consumed)
    try:
        sheets = notebook["cells"] if "cells" in notebook else [cell for sheet in notebook["worksheets"] for cell in sheet["cells"]]
        language = _language(notebook)
        blocks = [block for cell in sheets for block in _blocks(cell, language, outputs)]
    except (KeyError, TypeError, AttributeError):
        return quarantined("not_a_notebook", origin, raw.text, consumed)
    return Item("\n\n".join(blocks), origin, consumed)


def _language(notebook: dict[str, Any]) -> str:
    about = notebook.get("metadata") or {}
    name = (about.get("language_info") or {}).get("name") or (about.get("kernelspec") or {}).get("language") or "python"
    return name if isinstance(name, str) and name.isidentifier() and len(name) <= _LONGEST_NAME else ""


def _blocks(cell: dict[str, Any], language: str, outputs: bool) -> list[str]:
    source = _joined(cell.get("source", cell.get("input", ""))).strip("\n")
    if not source.strip():
        return []
    if cell["cell_type"] != "code":
        return [f"{_marks(cell.get('level'))} {source}" if cell["cell_type"] == "heading" else source]
    printed = "".join(_printed(output) for output in cell.get("outputs", ())).strip("\n") if outputs else ""
    return [f"```{language}\n{source}\n```", *([f"```\n{printed}\n```"] if printed else [])]


def _marks(level: Any) -> str:
    """The Markdown prefix of a heading; an invalid level counts as 1."""
    return "#" * min(max(level, 1), 6) if isinstance(level, int) else "#"


def _printed(output: dict[str, Any]) -> str:
    """Text that a cell printed or returned; images and HTML are left out."""
    if output.get("output_type") in ("stream", "pyout"):
        return _joined(output.get("text", ""))
    return _joined((output.get("data") or {}).get("text/plain", "")) + "\n" if "data" in output else ""


def _joined(value: Any) -> str:
    text = "".join(value) if isinstance(value, list) else value
    if not isinstance(text, str):
        raise TypeError("no text")
    return text
