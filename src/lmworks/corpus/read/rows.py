"""Converts a row of columns to an item: its text, extracted from markup if needed, its facts, and its language.

Markdown is kept as written; of a block of metadata before it only the title is kept, as a heading.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from string import Formatter
from types import TracebackType
from typing import Any

from lmworks.corpus.document import Fact
from lmworks.corpus.read.markup import Extractor
from lmworks.corpus.read.part import EXCERPT, Item, decode_document, quarantined
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Source

# a key of YAML, then keys, elements, continued lines and comments; what else stands between two rules is text
_KEY = r"[\"']?[\w.-]+[\"']?:(?:[ \t][^\n]*)?"
_FRONT_MATTER = re.compile(rf"\A---\n({_KEY}\n(?:(?:{_KEY}|-(?:[ \t][^\n]*)?|[ \t][^\n]*|#[^\n]*|[\]}}])?\n)*?)---\n")
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


_LONGEST_FACT = 16384
_WHOLE_PAGE = re.compile("<(?:html|body)[ >]", re.IGNORECASE)


class Columns:
    """The columns that a source uses: `text_key` (a column, a dotted path, or a template), `fact_keys`, `language_key`.

    A context manager; columns of HTML are parsed by a process with limits.
    """

    def __init__(self, source: Source, limit: int) -> None:
        self._source, self._limit = source, limit
        self._template = "{" in source.text_key
        self._fields = tuple(name.removesuffix("?") for name in source.text_fields)
        self._may_lack = frozenset(name[:-1] for name in source.text_fields if name.endswith("?"))
        self._language = source.language_key
        self._stack = ExitStack()
        self._html: Extractor | None = None

    def __enter__(self) -> Columns:
        if "html" in self._source.markup.values():
            self._html = self._stack.enter_context(Extractor("html"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def columns_to_read(self, known: Iterable[str], where: str) -> list[str]:
        """The columns to read, of those that are `known`. Raises UserError if one is missing."""
        names, found = set(known), []
        for path in (*self._fields, *self._source.fact_keys, *filter(None, [self._language])):
            column = path if path in names else path.partition(".")[0]
            if column not in names and path in self._may_lack:
                continue
            if column not in names:
                key = "text_key" if path in self._fields else "fact_keys" if path in self._source.fact_keys else "language_key"
                raise UserError(f"{where} has no column {column!r}, only {', '.join(sorted(names))}; set {key}")
            found.append(column)
        return list(dict.fromkeys(found))

    def item(self, row: Mapping[str, Any], origin: str, consumed: int) -> Item:
        """The row as a document or a quarantined item."""
        text = self._text(row, origin, consumed)
        if text.reason is not None:
            return text
        facts = {path: fact for path in self._source.fact_keys if (fact := _fact(_lookup(row, path))) is not None}
        language = _fact(_lookup(row, self._language)) if self._language else None
        return Item(text.text, origin, consumed, None, facts, language if isinstance(language, str) and language else None)

    def _text(self, row: Mapping[str, Any], origin: str, consumed: int) -> Item:
        if not self._template:
            item = self._value(row, self._fields[0], origin, consumed)
            return replace(item, text=_excerpt(row)[:EXCERPT]) if item.reason == "null_text" else item
        values = {}
        for name in self._fields:
            if _lookup(row, name) is None and name in self._may_lack:
                values[name] = ""
                continue
            item = self._value(row, name, origin, consumed)
            if item.reason == "null_text":
                return quarantined("missing_column", origin, f"{name} is missing in {_excerpt(row)}", consumed)
            if item.reason is not None:
                return item
            values[name] = item.text
        if not any(text.strip() for text in values.values()):
            return quarantined("null_text", origin, "", consumed)
        pieces = Formatter().parse(self._source.text_key)
        text = "".join(before + ("" if name is None else values[name.removesuffix("?")]) for before, name, _, _ in pieces)
        return Item(text, origin, consumed)

    def _value(self, row: Mapping[str, Any], name: str, origin: str, consumed: int) -> Item:
        """The value of one column as text."""
        value = _lookup(row, name)
        if self._template and isinstance(value, int | float):
            value = str(value)
        markup = self._source.markup.get(name)
        item = text_of(value, origin, (4 if markup else 1) * self._limit, consumed)
        if item.reason is not None or markup is None:
            return item
        if markup == "markdown":
            return replace(item, text=without_front_matter(item.text))
        assert self._html, "the context is entered before rows are read"
        return self._html.text(_page(item.text).encode("utf-8", "replace"), origin, consumed) if item.text.strip() else item


def _page(html: str) -> str:
    """A fragment of HTML as a page: the extractor ignores short pages without a body."""
    return html if _WHOLE_PAGE.search(html) else f"<html><body><article><p>{html}</p></article></body></html>"


def _excerpt(row: Mapping[str, Any]) -> str:
    return _as_json(dict(row)) or "a row that is nested too deep"


def _lookup(row: Mapping[str, Any], path: str) -> Any:
    if path in row or "." not in path:
        return row.get(path)
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _fact(value: Any) -> Fact | None:
    """A value as a fact: lists and objects become JSON; bytes, decimals, durations and identifiers text; missing, non-finite, oversized and
    too deep values None."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value  # older writers mark no texts as such
    text = text if isinstance(text, str) else _as_json(text) if isinstance(text, Mapping | list | tuple) else str(text)
    return text.encode("utf-8", "replace").decode() if text is not None and len(text) <= _LONGEST_FACT else None


def _as_json(value: Any) -> str | None:
    """JSON of a value; None for one that is nested too deep."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return None


def text_of(value: Any, origin: str, limit: int, consumed: int) -> Item:
    """The value of a text column as an item."""
    if value is None:
        return quarantined("null_text", origin, "", consumed)
    if isinstance(value, bytes):
        return decode_document(value, origin, limit, consumed)
    if not isinstance(value, str):
        return quarantined("wrong_type", origin, repr(value)[:1000], consumed)
    return Item(value, origin, consumed)
