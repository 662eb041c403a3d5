"""Python's standard library as text that every machine has: its code, its language reference and its docstrings (PSF license)."""

from __future__ import annotations

import ast
import fnmatch
import inspect
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from lmworks.corpus.read.listing import File
from lmworks.corpus.read.part import Item, Part, decode_document, pack_files, quarantined
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Source

# tests (absent on some systems), third-party packages and generated tables
_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "pydoc_data",
    "turtledemo",
    "encodings",
    "ensurepip",
}
_LEAST_DOCSTRING = 120


_TOPICS = "pydoc_data/topics.py"


def parts(source: Source, part_bytes: int) -> list[Part]:
    """The library's *.py files, sorted; for docs, preceded by the topics of the language reference."""
    name = source.document_format or "code"
    if name not in FORMATS:
        raise UserError(f"unknown document_format {name!r} of the standard library; known are {', '.join(FORMATS)}")
    first = [_file(_TOPICS)] if name == "docs" else []
    return list(pack_files([*first, *_files(source.include)], part_bytes))


def read(source: Source, part: Part, limit: int) -> Iterator[Item]:
    """The items of the part."""
    return FORMATS[source.document_format or "code"](part.files, limit)


def _file(relative: str) -> File:
    status = Path(sysconfig.get_path("stdlib"), relative).stat()
    return File(relative, status.st_size, str(status.st_mtime_ns))


def _files(include: str | None) -> list[File]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(("config-", "."))]
        for name in names:
            relative = Path(folder, name).relative_to(root).as_posix()
            if name.endswith(".py") and not name.startswith("_sysconfigdata") and fnmatch.fnmatchcase(relative, include or "*"):
                found.append(relative)
    return [_file(relative) for relative in sorted(found)]


def _read(relative: str, size: int, limit: int) -> Item:
    path = Path(sysconfig.get_path("stdlib"), relative)
    if size > limit:
        return quarantined("enormous", relative, "", size)
    return decode_document(path.read_bytes(), relative, limit, size)


def _code(files: tuple[File, ...], limit: int) -> Iterator[Item]:
    """Each file is a document."""
    for file in files:
        yield _read(file.path, file.size, limit)


def _docs(files: tuple[File, ...], limit: int) -> Iterator[Item]:
    """One document per topic of the language reference, and one per module with its docstrings under their names."""
    for relative, size in ((file.path, file.size) for file in files):
        if relative == _TOPICS:
            from pydoc_data import topics

            yield from (Item(text, f"pydoc_data.topics:{topic}") for topic, text in sorted(topics.topics.items()))
            continue
        item = _read(relative, size, limit)
        if item.reason is not None:
            yield item
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(item.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            yield quarantined("does_not_parse", relative, item.text, size)
            continue
        module = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        text = "\n\n".join(_docstrings(tree, module))
        if len(text) >= _LEAST_DOCSTRING:
            yield Item(text, f"{relative}:docstrings", size)


def _docstrings(node: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
    """Docstrings in source order; that of a function follows its name and arguments. Function bodies are not searched."""
    if text := ast.get_docstring(node, clean=False):
        text = inspect.cleandoc(text)
        yield text if text.startswith(name) else f"{name}\n\n{text}"
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _docstrings(child, f"{name}.{child.name}")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(child, clean=False)):
            body = "\n".join(f"    {line}".rstrip() for line in inspect.cleandoc(text).splitlines())
            yield f"{name}.{child.name}({ast.unparse(child.args)})\n{body}"


FORMATS: dict[str, Callable[[tuple[File, ...], int], Iterator[Item]]] = {"code": _code, "docs": _docs}
