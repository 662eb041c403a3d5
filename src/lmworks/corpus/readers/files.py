"""Files of text: each is a document, or as its layout has it."""

from __future__ import annotations

from collections.abc import Iterator

from lmworks.corpus.items import Item
from lmworks.corpus.layouts import Layout, Member, layout
from lmworks.corpus.opening import File, find, open_binary
from lmworks.corpus.readers.guard import guarded
from lmworks.corpus.readers.part import Part, packed
from lmworks.recipe.corpus import Source

SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": (),
    "markdown": (".md", ".markdown", ".mdown"),
    "code": (
        ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".js", ".ts", ".jsx", ".tsx",
        ".go", ".rs", ".rb", ".php", ".cs", ".swift", ".sh", ".sql", ".lua", ".jl", ".r", ".R", ".m", ".pl", ".hs", ".ml", ".ex",
        ".clj", ".zig", ".tex", ".md", ".rst",
    ),
}  # fmt: skip


def parts(source: Source, part_bytes: int) -> list[Part]:
    layout(source.layout or "file")
    files = find(source, SUFFIXES[source.kind] if not source.include else ())
    return list(packed(files, part_bytes))


def read(source: Source, part: Part, limit: int) -> Iterator[Item]:
    make = layout(source.layout or "file")
    for file in part.files:
        yield from guarded(_items(make, file, limit), file.path)


def _items(make: Layout, file: File, limit: int) -> Iterator[Item]:
    with open_binary(file.path) as (stream, _):
        yield from make(iter([Member(file.path, file.size, stream)]), limit)
