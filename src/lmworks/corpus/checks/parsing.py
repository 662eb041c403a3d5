"""Whether code parses: Python by its own compiler, other languages by their tree-sitter grammar. Nothing is run."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from lmworks.errors import UserError
from lmworks.untrusted.limited_process import CallFailed, LimitedProcess, ProcessDied

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
_SECONDS, _MEMORY = 60.0, 2 << 30  # for one text; tree-sitter takes up to 3 kB for a byte of crafted C++
_parser = LimitedProcess("lmworks.corpus.checks.parsing:parser", _SECONDS, _MEMORY)


def suffix(path: str) -> str:
    """The ending of a path in small letters, without the dot and without a row behind it; empty if it has none."""
    found = _SUFFIX.search(path)
    return found[1].lower() if found else ""


class Parsed(NamedTuple):
    """Of a text: the share of its bytes that lie in syntax errors, 0 to 1, and for people what the first error is ("" if unknown)."""

    share: float
    error: str


def parsed(text: str, kind: str) -> Parsed:
    """Parse a text of a suffix of `KNOWN`, in a process with limits, since hostile text makes parsers take any amount of memory.

    Python and JSON parse (0) or do not (1); a token that a grammar misses counts as one byte. What takes more than the limits does not
    parse. Raises `UserError` without the grammar (extra `code`).
    """
    try:
        if kind in _GRAMMARS:
            _grammar(kind)  # whether there is one
        share, _, why = _parser(f"{kind}\n".encode() + text.encode("utf-8", "surrogatepass")).decode().partition(" ")
    except ProcessDied as ended:
        return Parsed(1.0, f"parsing it {ended}")
    except CallFailed as failed:
        return Parsed(1.0, str(failed))
    except ImportError:
        raise UserError(f"the step code needs a grammar for .{kind} files: pip install 'lmworks[code]'") from None
    except OSError as error:
        raise UserError(f"code cannot be parsed: {error}") from None
    return Parsed(float(share), why)


def parser() -> Callable[[bytes], bytes]:
    """What the process does: from a suffix, a line end and the text to the share and the error, with a space between them."""

    def parse(data: bytes) -> bytes:
        kind, _, code = data.partition(b"\n")
        share, error = _parse(code.decode("utf-8", "surrogatepass"), kind.decode())
        return f"{share!r} {error}".encode("utf-8", "replace")

    return parse


def _parse(text: str, kind: str) -> Parsed:
    if kind in ("py", "pyi"):
        error = _python_error(text)
        return Parsed(float(error is not None), error or "")
    if kind == "json":
        try:
            json.loads(text)
        except (ValueError, RecursionError, MemoryError) as error:
            return Parsed(1.0, str(error) or type(error).__name__)
        return Parsed(0.0, "")
    data = text.encode("utf-8", "replace")
    return Parsed(min(_bad_bytes(_grammar(kind)(data)) / max(len(data), 1), 1.0), "")


def _python_error(text: str) -> str | None:
    """Why Python would not compile the text; None if it would. Nothing is run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "<document>", "exec", flags=ast.PyCF_ONLY_AST, dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return type(error).__name__
    return None


@lru_cache(maxsize=32)
def _grammar(kind: str) -> Callable[[bytes], Any]:
    from tree_sitter import Language, Parser

    module, _, function = _GRAMMARS[kind].partition(".")
    return Parser(Language(getattr(import_module(module), function or "language")())).parse


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
