"""Files of text, Markdown, HTML, LaTeX, notebooks and code, in directories and archives: one document per file, unless a document_format
says otherwise.

Jupyter notebooks as text: Markdown cells unchanged, code cells in fences, and optionally their outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from lmworks.corpus.read.archives import ARCHIVES, is_archive, members
from lmworks.corpus.read.formats import Member, document_format
from lmworks.corpus.read.json_rows import line_parts, lines_of
from lmworks.corpus.read.listing import File, find_files, has_extension, matches
from lmworks.corpus.read.markup import Extractor
from lmworks.corpus.read.opening import open_binary
from lmworks.corpus.read.part import Item, Part, decode_document, pack_files, printable, quarantine_errors, quarantined
from lmworks.corpus.read.rows import without_front_matter
from lmworks.errors import UserError
from lmworks.io.files import read_at_most
from lmworks.recipe.schema.corpus import Source

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


FACTS = ("path",)
SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": (".txt", ".text"),
    "markdown": (".md", ".markdown", ".mdown"),
    "html": (".html", ".htm", ".xhtml"),
    "latex": (".tex", ".latex"),
    "notebook": (".ipynb",),
    "code": (
        ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".js", ".ts", ".jsx", ".tsx",
        ".go", ".rs", ".rb", ".php", ".cs", ".swift", ".sh", ".sql", ".lua", ".jl", ".r", ".R", ".m", ".pl", ".hs", ".ml", ".ex",
        ".clj", ".zig", ".tex", ".md", ".rst",
    ),
}  # fmt: skip

Convert = Callable[[Member, int], Iterator[Item]]


def suffixes(source: Source) -> tuple[str, ...]:
    """Endings of the files that are read in a folder or archive; those that `include` names may have any, unless it names archives."""
    return () if source.include and not is_archive(source.include) else SUFFIXES[source.kind]


def with_archives(source: Source) -> tuple[str, ...]:
    """The same, and those of archives."""
    found = suffixes(source)
    return (*found, *ARCHIVES) if found else ()


def parts(source: Source, part_bytes: int) -> list[Part]:
    with ExitStack() as stack:
        _convert(source, stack)
    files = find_files(source, with_archives(source), ARCHIVES)
    return list(line_parts(files, part_bytes) if source.document_format == "lines" else pack_files(files, part_bytes))


def read(source: Source, part: Part, limit: int) -> Iterator[Item]:
    with ExitStack() as stack:
        convert = _convert(source, stack)
        for file in part.files:
            if is_archive(file.path):
                yield from quarantine_errors(_archived(source, convert, file, limit), file.path)
            elif source.document_format == "lines":
                yield from quarantine_errors(_lines(file, part.span, limit), file.path)
            else:
                yield from quarantine_errors(_convert_file(convert, file, limit), file.path)


def _convert_file(convert: Convert, file: File, limit: int) -> Iterator[Item]:
    with open_binary(file.path) as (stream, _):
        yield from _named(convert(Member(file.path, file.size, stream), limit), file.path)


def _lines(file: File, span: tuple[int, int] | None, limit: int) -> Iterator[Item]:
    for line, complete, origin, consumed in lines_of(file, span, limit):
        if not complete:
            yield quarantined("enormous", origin, line, consumed)
        elif line.strip():
            yield from _named(iter([decode_document(line, origin, limit, consumed)]), file.path)


def _archived(source: Source, convert: Convert, file: File, limit: int) -> Iterator[Item]:
    pattern = source.include if source.include and not is_archive(source.include) else None
    for member in members(file):
        if isinstance(member, Item):
            yield member
            continue
        name = f"{file.path}/{member.name}"
        if not has_extension(member.name, suffixes(source)):
            yield quarantined("other_ending", printable(name), "", member.size)
        elif matches(member.name, pattern):
            yield from quarantine_errors(_named(convert(replace(member, name=name), limit), name), name)


def _named(items: Iterator[Item], path: str) -> Iterator[Item]:
    for item in items:
        yield replace(item, origin=printable(item.origin), facts={**item.facts, "path": printable(path)}) if item.reason is None else item


def _convert(source: Source, stack: ExitStack) -> Convert:
    """The function from an open file to its items. Raises UserError for a document_format that the kind does not have."""
    kind, name = source.kind, source.document_format
    if kind in ("text", "code"):
        make = document_format(name or "file")
        return lambda member, limit: make(iter([member]), limit)
    known = FORMATS if kind == "notebook" else ("file",)
    if name is not None and name not in known:
        raise UserError(f"unknown document_format {name!r} of kind {kind}; known are {', '.join(known)}")
    if kind == "notebook":
        return _whole(lambda data, origin, limit, size: text_of(data, origin, limit, size, outputs=name == "outputs"))
    if kind == "markdown":
        return _whole(_markdown)
    extractor = stack.enter_context(Extractor(kind))
    return _whole(lambda data, origin, limit, size: extractor.text(data, origin, size))


def _whole(text_of: Callable[[bytes, str, int, int], Item]) -> Convert:
    """Convert a file to one document. Markup, outputs and images take space, so a file may be four times as long as a document."""

    def convert(member: Member, limit: int) -> Iterator[Item]:
        data = read_at_most(member.stream, 4 * limit + 1)
        if len(data) > 4 * limit:
            yield quarantined("enormous", printable(member.name), data, member.size)
        else:
            yield text_of(data, printable(member.name), limit, member.size)

    return convert


def _markdown(data: bytes, origin: str, limit: int, size: int) -> Item:
    item = decode_document(data, origin, limit, size)
    return replace(item, text=without_front_matter(item.text)) if item.reason is None else item
