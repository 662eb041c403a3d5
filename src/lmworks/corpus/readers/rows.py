"""From a row of columns to an item: the text, what is known about it, its language."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any

from lmworks.corpus.document import Fact
from lmworks.corpus.items import Item, broken, decoded
from lmworks.errors import UserError
from lmworks.recipe.corpus import Source

_LONGEST_FACT = 16384


class Columns:
    """What a source takes from each of its rows: `text_key` (a column, a dotted path, or a template of them), `keep`, `language_key`."""

    def __init__(self, source: Source, limit: int) -> None:
        self._source, self._limit = source, limit
        self._template = "{" in source.text_key
        fields = [name for _, name, _, _ in Formatter().parse(source.text_key) if name] if self._template else [source.text_key]
        self._fields = tuple(fields)
        self._language = source.language_key

    def wanted(self, known: Iterable[str], where: str) -> list[str]:
        """The columns to read of those `known`. Raises UserError if one is not there."""
        names, found = set(known), []
        for path in (*self._fields, *self._source.keep, *filter(None, [self._language])):
            column = path if path in names else path.partition(".")[0]
            if column not in names:
                key = "text_key" if path in self._fields else "keep" if path in self._source.keep else "language_key"
                raise UserError(f"{where} has no column {column!r}, only {', '.join(sorted(names))}; set {key}")
            found.append(column)
        return list(dict.fromkeys(found))

    def item(self, row: Mapping[str, Any], origin: str, consumed: int) -> Item:
        """The row as a document, or as what is wrong with it."""
        text = self._text(row, origin, consumed)
        if text.reason is not None:
            return text
        facts = {path: fact for path in self._source.keep if (fact := _fact(_lookup(row, path))) is not None}
        language = _lookup(row, self._language) if self._language else None
        return Item(text.text, origin, consumed, None, facts, language if isinstance(language, str) and language else None)

    def _text(self, row: Mapping[str, Any], origin: str, consumed: int) -> Item:
        if not self._template:
            return text_of(_lookup(row, self._source.text_key), origin, self._limit, consumed)
        values = {name: _lookup(row, name) for name in self._fields}
        if all(value is None for value in values.values()):
            return broken("null_text", origin, "", consumed)
        if strange := [value for value in values.values() if value is not None and not isinstance(value, str | int | float)]:
            return broken("wrong_type", origin, repr(strange[0])[:1000], consumed)
        pieces = [
            before + ("" if name is None or values[name] is None else str(values[name]))
            for before, name, _, _ in Formatter().parse(self._source.text_key)
        ]
        return text_of("".join(pieces), origin, self._limit, consumed)


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
    """A value as a fact: what is no number and no string as JSON, what is missing, endless or enormous as None."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode() if len(text) <= _LONGEST_FACT else None


def text_of(value: Any, origin: str, limit: int, consumed: int) -> Item:
    """The value of a text column as an item."""
    if value is None:
        return broken("null_text", origin, "", consumed)
    if isinstance(value, bytes):
        return decoded(value, origin, limit, consumed)
    if not isinstance(value, str):
        return broken("wrong_type", origin, repr(value)[:1000], consumed)
    return Item(value, origin, consumed)
