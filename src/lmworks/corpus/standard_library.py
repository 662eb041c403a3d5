"""Python's own standard library as text that every machine has: its code, its language reference and its docstrings (PSF licence)."""

from __future__ import annotations

import ast
import fnmatch
import inspect
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from lmworks.corpus.items import Item, broken, decoded

# tests (absent on some systems), other people's packages, and generated tables are no code to learn from
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


def files(include: str | None = None) -> list[tuple[str, int]]:
    """The library's *.py files as (path relative to it, bytes), sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(("config-", "."))]
        for name in names:
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if name.endswith(".py") and not name.startswith("_sysconfigdata") and fnmatch.fnmatchcase(relative, include or "*"):
                found.append((relative, path.stat().st_size))
    return sorted(found)


def _read(relative: str, size: int, limit: int) -> Item:
    path = Path(sysconfig.get_path("stdlib"), relative)
    if size > limit:
        return broken("enormous", relative, "", size)
    return decoded(path.read_bytes(), relative, limit, size)


def code(listed: list[tuple[str, int]], limit: int) -> Iterator[Item]:
    """Each file is a document."""
    for relative, size in listed:
        yield _read(relative, size, limit)


def docs(listed: list[tuple[str, int]], limit: int) -> Iterator[Item]:
    """Each topic of the language reference is a document; so are the docstrings of each module, under the names they belong to."""
    from pydoc_data import topics

    for topic, text in sorted(topics.topics.items()):
        yield Item(text, f"pydoc_data.topics:{topic}")
    for relative, size in listed:
        item = _read(relative, size, limit)
        if item.reason is not None:
            yield item
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(item.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            yield broken("does_not_parse", relative, item.text, size)
            continue
        module = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        text = "\n\n".join(_docstrings(tree, module))
        if len(text) >= _LEAST_DOCSTRING:
            yield Item(text, f"{relative}:docstrings", size)


def _docstrings(node: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
    """Docstrings in source order; that of a function stands below its name and arguments. Bodies of functions are not entered."""
    if text := ast.get_docstring(node, clean=False):
        text = inspect.cleandoc(text)
        yield text if text.startswith(name) else f"{name}\n\n{text}"
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _docstrings(child, f"{name}.{child.name}")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(child, clean=False)):
            body = "\n".join(f"    {line}".rstrip() for line in inspect.cleandoc(text).splitlines())
            yield f"{name}.{child.name}({ast.unparse(child.args)})\n{body}"


LAYOUTS: dict[str, Callable[[list[tuple[str, int]], int], Iterator[Item]]] = {"code": code, "docs": docs}
