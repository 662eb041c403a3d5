"""The text of a web page as Markdown: headings, lists, tables and code are kept; navigation and boilerplate are removed."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

_CODE = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
_ESCAPE = re.compile(r"\\([\\`*_{}\[\]()#+.!<>|~-])")
_DECLARED = re.compile(rb"<meta[^>]{0,200}?charset\s{0,9}=\s{0,9}[\"']?\s{0,9}([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
# matches only at the beginning of a run of spaces; otherwise the search would be quadratic in the length of the run
_PERMALINK = re.compile(r"(?<![ \t])[ \t]*¶[ \t]*$", re.MULTILINE)


def extractor() -> Callable[[bytes], bytes]:
    """The function from a page to its text in UTF-8 (b"" if it has none). Raises ImportError if trafilatura (extra `web`) is not
    installed.
    """
    import logging

    import trafilatura

    logging.disable()

    def extract(data: bytes) -> bytes:
        found = trafilatura.extract(decoded(data), fast=True, favor_precision=True, include_comments=False, output_format="markdown")
        return unescaped(found or "").encode("utf-8", "replace")

    return extract


def decoded(data: bytes) -> str | bytes:
    """A page as text, decoded by its byte order mark, as UTF-8, or with its declared encoding; unchanged bytes if none of these works, so
    that trafilatura detects the encoding.

    trafilatura would detect first, and its result depends on the installed detectors.
    """
    declared = _DECLARED.search(data, 0, 4096)
    marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    for encoding in ["utf-16"] if marked else ["utf-8-sig", *([declared[1].decode("ascii")] if declared else [])]:
        try:
            text, _ = codecs.getdecoder(encoding)(data)
        except (LookupError, ValueError):
            continue
        if isinstance(text, str):  # a codec such as hex makes bytes
            return text
    return data


def unescaped(markdown: str) -> str:
    """Markdown without backslashes in prose before characters with a meaning in Markdown."""
    pieces = _CODE.split(_PERMALINK.sub("", markdown))
    return "".join(piece if place % 2 else _ESCAPE.sub(r"\1", piece) for place, piece in enumerate(pieces))
