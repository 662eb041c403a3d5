"""Checks whether code parses: Python with its own compiler, other languages with their tree-sitter grammars. No code is run."""

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
_GRAMMARS = {  # suffix: module, and the function in it that returns the grammar
    "bash": "tree_sitter_bash", "sh": "tree_sitter_bash", "c": "tree_sitter_c", "h": "tree_sitter_cpp", "cc": "tree_sitter_cpp",
    "cpp": "tree_sitter_cpp", "cxx": "tree_sitter_cpp", "hpp": "tree_sitter_cpp", "hh": "tree_sitter_cpp",
    "cs": "tree_sitter_c_sharp", "css": "tree_sitter_css", "go": "tree_sitter_go", "java": "tree_sitter_java",
    "js": "tree_sitter_javascript", "mjs": "tree_sitter_javascript", "cjs": "tree_sitter_javascript", "jsx": "tree_sitter_javascript",
    "php": "tree_sitter_php.language_php", "rb": "tree_sitter_ruby", "rs": "tree_sitter_rust",
    "ts": "tree_sitter_typescript.language_typescript", "tsx": "tree_sitter_typescript.language_tsx",
}  # fmt: skip
KNOWN = frozenset({"py", "pyi", "json", *_GRAMMARS})
"""Suffixes of files that can be parsed."""
_SECONDS, _MEMORY = 60.0, 2 << 30  # per text; tree-sitter uses up to 3 kB per byte of adversarial C++
_parser = LimitedProcess("lmworks.corpus.transform.parsing:parser", _SECONDS, _MEMORY)


def suffix(path: str) -> str:
    """The extension of a path in lower case, without the dot and without a row number after it; empty if there is none."""
    found = _SUFFIX.search(path)
    return found[1].lower() if found else ""


class ParseResult(NamedTuple):
    """The fraction of bytes in syntax errors, from 0 to 1, and the first error in words ("" if unknown)."""

    share: float
    error: str


def parse_code(text: str, kind: str) -> ParseResult:
    """Parse a text with a suffix in `KNOWN`, in a process with limits, because adversarial text makes parsers use unbounded memory.

    Python and JSON have a fraction of 0 or 1. A token that a grammar misses counts as one byte. A text that exceeds the limits does not
    parse. Raises `UserError` if the grammar is not installed (extra `code`).
    """
    try:
        if kind in _GRAMMARS:
            _grammar(kind)  # raises ImportError if it is not installed
        share, _, why = _parser(f"{kind}\n".encode() + text.encode("utf-8", "surrogatepass")).decode().partition(" ")
    except ProcessDied as ended:
        return ParseResult(1.0, f"parsing it {ended}")
    except CallFailed as failed:
        return ParseResult(1.0, str(failed))
    except ImportError:
        raise UserError(f"the step code needs a grammar for .{kind} files: pip install 'lmworks[code]'") from None
    except OSError as error:
        raise UserError(f"code cannot be parsed: {error}") from None
    return ParseResult(float(share), why)


def parser() -> Callable[[bytes], bytes]:
    """The function of the separate process: its input is the suffix, a newline and the text; its output is the fraction, a space and the
    error.
    """

    def parse(data: bytes) -> bytes:
        kind, _, code = data.partition(b"\n")
        share, error = _parse(code.decode("utf-8", "surrogatepass"), kind.decode())
        return f"{share!r} {error}".encode("utf-8", "replace")

    return parse


def _parse(text: str, kind: str) -> ParseResult:
    if kind in ("py", "pyi"):
        error = _python_error(text)
        return ParseResult(float(error is not None), error or "")
    if kind == "json":
        try:
            json.loads(text)
        except (ValueError, RecursionError, MemoryError) as error:
            return ParseResult(1.0, str(error) or type(error).__name__)
        return ParseResult(0.0, "")
    data = text.encode("utf-8", "replace")
    return ParseResult(min(_error_bytes(_grammar(kind)(data)) / max(len(data), 1), 1.0), "")


def _python_error(text: str) -> str | None:
    """The error with which Python rejects the text, or None. The code is compiled but not run."""
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


def _error_bytes(tree: Any) -> int:
    """Bytes in error nodes. Only subtrees that contain an error are visited."""
    total, todo = 0, [tree.root_node] if tree.root_node.has_error else []
    while todo:
        node = todo.pop()
        if node.is_error or node.is_missing:
            total += max(node.end_byte - node.start_byte, 1)
        else:
            todo += [child for child in node.children if child.has_error or child.is_missing]
    return total
