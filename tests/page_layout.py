"""What is wrong with the layout of a page, as a browser has drawn it: text that is cut, collides, or has too little contrast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

_HERE = Path(__file__).parent
_SCRIPT = (_HERE / "page_layout.js").read_text(encoding="utf-8")
TEXTS_OF_CANVASES = (_HERE / "canvas_texts.js").read_text(encoding="utf-8")  # for context.add_init_script, before a page is opened
CONTRAST = 4.5  # WCAG 2.2, AA, for text of normal size; 3 for large text
LARGE = 24  # CSS pixels from which text is large, 18.66 if bold


def faults(page: Page) -> list[str]:
    """One line for each fault, at most 40. Text in a container that scrolls is not cut; a chart must have drawn its lines."""
    page.evaluate(
        "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
    )  # charts are drawn in one
    found: list[str] = page.evaluate(_SCRIPT, {"contrast": CONTRAST, "large": LARGE})
    return found
