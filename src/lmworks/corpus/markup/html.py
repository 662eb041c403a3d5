"""The text of a web page, as Markdown: headings, lists, tables and code keep their form, navigation and boilerplate go."""

from __future__ import annotations

import re
from collections.abc import Callable

_CODE = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
_ESCAPE = re.compile(r"\\([\\`*_{}\[\]()#+.!<>|~-])")
_PERMALINK = re.compile(r"[ \t]*¶[ \t]*$", re.MULTILINE)


def extractor() -> Callable[[bytes], str]:
    """The function from a page to its text ("" if it has none). Raises ImportError without trafilatura (extra `web`)."""
    import logging

    import trafilatura

    logging.disable()

    def extract(data: bytes) -> str:
        found = trafilatura.extract(data, fast=True, favor_precision=True, include_comments=False, output_format="markdown")
        return unescaped(found or "")

    return extract


def unescaped(markdown: str) -> str:
    """Markdown in which prose stands as it was written: no backslash before a character that Markdown might mistake."""
    pieces = _CODE.split(_PERMALINK.sub("", markdown))
    return "".join(piece if place % 2 else _ESCAPE.sub(r"\1", piece) for place, piece in enumerate(pieces))
