"""Whether code parses: Python by its own compiler, other languages by their tree-sitter grammar. Nothing is run."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from lmworks.errors import UserError

_SUFFIX = re.compile(r"\.([A-Za-z0-9+]+)(?::\d+)?$")
_GRAMMARS = {  # suffix: module and the function in it that gives the grammar
    "bash": "tree_sitter_bash", "sh": "tree_sitter_bash", "c": "tree_sitter_c", "h": "tree_sitter_cpp", "cc": "tree_sitter_cpp",
    "cpp": "tree_sitter_cpp", "cxx": "tree_sitter_cpp", "hpp": "tree_sitter_cpp", "hh": "tree_sitter_cpp",
    "cs": "tree_sitter_c_sharp", "css": "tree_sitter_css", "go": "tree_sitter_go", "java": "tree_sitter_java",
    "js": "tree_sitter_javascript", "mjs": "tree_sitter_javascript", "cjs": "tree_sitter_javascript", "jsx": "tree_sitter_javascript",
    "php": "tree_sitter_php.language_php", "rb": "tree_sitter_ruby", "rs": "tree_sitter_rust",
    "ts": "tree_sitter_typescript.language_typescript", "tsx": "tree_sitter_typescript.language_tsx",
}  # fmt: skip
KNOWN = frozenset({"py", "pyi", "json", *_GRAMMARS})
"""Suffixes of files that can be parsed here."""


def suffix(path: str) -> str:
    """The ending of a path in small letters, without the dot and without a row behind it; empty if it has none."""
    found = _SUFFIX.search(path)
    return found[1].lower() if found else ""


def python_error(text: str) -> str | None:
    """Why Python would not compile the text; None if it would. Safe for hostile text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "<document>", "exec", flags=ast.PyCF_ONLY_AST, dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return type(error).__name__
    return None


def error_share(text: str, kind: str) -> float:
    """Share of the bytes that lie in syntax errors, 0 to 1, for a suffix of `KNOWN`. Python and JSON parse (0) or do not (1).

    A token that the grammar misses counts as one byte.
    """
    if kind in ("py", "pyi"):
        return float(python_error(text) is not None)
    if kind == "json":
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return 1.0
        return 0.0
    data = text.encode("utf-8", "replace")
    return min(_bad_bytes(_parser(kind)(data)) / max(len(data), 1), 1.0)


@lru_cache(maxsize=32)
def _parser(kind: str) -> Callable[[bytes], Any]:
    module, _, function = _GRAMMARS[kind].partition(".")
    try:
        from tree_sitter import Language, Parser

        grammar = getattr(import_module(module), function or "language")
    except ImportError:
        raise UserError(f"the step code needs a grammar for .{kind} files: pip install 'lmworks[code]'") from None
    parser = Parser(Language(grammar()))
    return parser.parse


def _bad_bytes(tree: Any) -> int:
    """Only nodes that hold an error are descended into."""
    total, todo = 0, [tree.root_node] if tree.root_node.has_error else []
    while todo:
        node = todo.pop()
        if node.is_error or node.is_missing:
            total += max(node.end_byte - node.start_byte, 1)
        else:
            todo += [child for child in node.children if child.has_error or child.is_missing]
    return total
