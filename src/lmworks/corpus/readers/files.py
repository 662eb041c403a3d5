"""Files of text, Markdown, HTML, LaTeX, notebooks and code, in directories and archives: one document per file, unless a document_format
says otherwise.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

from lmworks.corpus.readers import notebook
from lmworks.corpus.readers.archives import ARCHIVES, is_archive, members
from lmworks.corpus.readers.document_formats import Member, document_format
from lmworks.corpus.readers.extraction import Extractor
from lmworks.corpus.readers.items import Item, decode_document, printable, quarantined
from lmworks.corpus.readers.json_rows import lines_of
from lmworks.corpus.readers.jsonl import line_parts
from lmworks.corpus.readers.listing import File, find_files, has_extension
from lmworks.corpus.readers.markdown import without_front_matter
from lmworks.corpus.readers.opening import open_binary
from lmworks.corpus.readers.part import Part, pack_files
from lmworks.corpus.readers.read_errors import quarantine_errors
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Source

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
    """Endings of the files that are read in a folder or archive; those that `include` names may have any."""
    return () if source.include else SUFFIXES[source.kind]


def with_archives(source: Source) -> tuple[str, ...]:
    """The same, and those of archives."""
    found = suffixes(source)
    return (*found, *ARCHIVES) if found else ()


def parts(source: Source, part_bytes: int) -> list[Part]:
    with ExitStack() as stack:
        _convert(source, stack)
    files = find_files(source, with_archives(source))
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
    for member in members(file):
        if isinstance(member, Item):
            yield member
            continue
        name = f"{file.path}/{member.name}"
        if not has_extension(member.name, suffixes(source)):
            yield quarantined("other_ending", printable(name), "", member.size)
        elif fnmatch.fnmatch(member.name, source.include or "*"):
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
    known = notebook.FORMATS if kind == "notebook" else ("file",)
    if name is not None and name not in known:
        raise UserError(f"unknown document_format {name!r} of kind {kind}; known are {', '.join(known)}")
    if kind == "notebook":
        return _whole(lambda data, origin, limit, size: notebook.text_of(data, origin, limit, size, outputs=name == "outputs"))
    if kind == "markdown":
        return _whole(_markdown)
    extractor = stack.enter_context(Extractor(kind))
    return _whole(lambda data, origin, limit, size: extractor.text(data, origin, size))


def _whole(text_of: Callable[[bytes, str, int, int], Item]) -> Convert:
    """Convert a file to one document. Markup, outputs and images take space, so a file may be four times as long as a document."""

    def convert(member: Member, limit: int) -> Iterator[Item]:
        data = member.stream.read(4 * limit + 1)
        if len(data) > 4 * limit:
            yield quarantined("enormous", printable(member.name), data, member.size)
        else:
            yield text_of(data, printable(member.name), limit, member.size)

    return convert


def _markdown(data: bytes, origin: str, limit: int, size: int) -> Item:
    item = decode_document(data, origin, limit, size)
    return replace(item, text=without_front_matter(item.text)) if item.reason is None else item
