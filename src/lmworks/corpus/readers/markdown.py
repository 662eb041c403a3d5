"""Markdown is kept as written; of a block of metadata before it only the title is kept, as a heading."""

from __future__ import annotations

import re

_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_TITLE = re.compile(r"^title:(.*)$", re.MULTILINE)


def without_front_matter(text: str) -> str:
    """The text without its block of metadata, except for the title."""
    text = text.replace("\r\n", "\n")
    front = _FRONT_MATTER.match(text)
    if front is None:
        return text
    found = _TITLE.search(front[1])
    title = found[1].strip(" \t") if found else ""
    if len(title) > 2 and title[0] == title[-1] and title[0] in "\"'":
        title = title[1:-1]
    body = text[front.end() :].lstrip("\n")
    return f"# {title}\n\n{body}" if title and not body.startswith("# ") else body
