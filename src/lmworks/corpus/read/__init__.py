"""Readers: a source is listed and cut into parts; each part is read independently, in any process, and yields items.

There is one file per family of kinds, each with `parts` and `read`. A malformed row becomes a quarantined item; only a source that is
missing or cannot be read at all is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

from lmworks.corpus.read import files, huggingface, json_rows, listing, parquet, repository, standard_library, warc, wheel
from lmworks.corpus.read.listing import File
from lmworks.corpus.read.markup import require
from lmworks.corpus.read.part import Item, Part, printable, quarantined
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Source

__all__ = ["ELSEWHERE", "File", "Part", "parts", "passed_over", "provides", "read"]

_FAMILIES: dict[str, ModuleType] = {
    "jsonl": json_rows,
    "parquet": parquet,
    **dict.fromkeys(files.SUFFIXES, files),
    "warc": warc,
    "repository": repository,
    "huggingface": huggingface,
    "wheel": wheel,
    "stdlib": standard_library,
}


ELSEWHERE = ("wheel", "stdlib", "huggingface")
"""Kinds whose files are not looked at for changes: pinned, part of Python, or remote."""
_REMEDIES = {
    "leads_out": "to read its target, make that a source",
    "unlisted_folder": "let this user list it, or leave it out of the path",
}


def passed_over(source: Source) -> str:
    """The files in the folder of a source that are not read because of their ending, in words; empty if there are none."""
    module = _FAMILIES[source.kind]
    endings = files.with_archives(source) if module is files else getattr(module, "SUFFIXES", ())
    return listing.passed_over(source, endings)


def provides(source: Source) -> tuple[str, ...]:
    """Names of the facts that items of the source may have."""
    return tuple(dict.fromkeys((*getattr(_FAMILIES[source.kind], "FACTS", ()), *source.fact_keys)))


def parts(source: Source, part_bytes: int) -> list[Part]:
    """Cut the source into parts of about `part_bytes`; the result depends only on the files.

    Raises Unavailable if the source is not available here, UserError if its description is wrong.
    """
    try:
        for markup in source.markup.values():
            require(markup)
        found: list[Part] = _FAMILIES[source.kind].parts(source, part_bytes)
    except UserError as error:
        raise type(error)(f"source {source.name}: {error}") from None
    except OSError as error:
        raise UserError(f"source {source.name}: cannot read {error.filename or source.path}: {error.strerror or error}") from None
    return found


def read(source: Source, part: Part, max_document: int) -> Iterator[Item]:
    """The items of a part, always the same: documents of at most `max_document` bytes of UTF-8, and rows that are not documents with the
    reason.
    """
    left = part.size
    for file in part.files:
        if file.unread:
            yield quarantined(file.unread, printable(file.path), f"{file.changed}; {_REMEDIES[file.unread]}")
    part = replace(part, files=tuple(file for file in part.files if not file.unread))
    try:
        for item in _FAMILIES[source.kind].read(source, part, max_document) if part.files else ():
            checked = _checked(item, max_document)
            yield checked if checked.consumed <= left or not part.size else replace(checked, consumed=left)
            left = max(left - checked.consumed, 0)
        for file in part.files if source.kind not in ELSEWHERE else ():
            if _has_changed(file):
                yield quarantined("changed_file", printable(file.path), "written to after it was listed; run the same command again")
    except UserError as error:
        raise type(error)(f"source {source.name}: {error}") from None


def _has_changed(file: File) -> bool:
    """Whether a local file, or repository, is still there and another than the one that was listed."""
    if os.path.isdir(file.path):
        return repository.tree(file.path) != file
    return os.path.isfile(file.path) and listing.local_file(file.path) != file


def _checked(item: Item, limit: int) -> Item:
    if item.reason is not None:
        return item
    text = item.text
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:  # JSON can contain lone surrogates
        return quarantined("bad_utf8", item.origin, text, item.consumed)
    if size > limit:
        return quarantined("enormous", item.origin, text, item.consumed)
    if not text or text.isspace():
        return quarantined("empty_text", item.origin, "", item.consumed)
    return item
