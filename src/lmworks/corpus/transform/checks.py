"""Checks of what a text claims: whether code parses, and whether arithmetic in it is right.

Python is parsed by its own compiler, other languages by their tree-sitter grammars. Checked are annotated and plain arithmetic, and a final
answer against an expected one. No code is run, and no text is evaluated as code.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
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
_parser = LimitedProcess("lmworks.corpus.transform.checks:parser", _SECONDS, _MEMORY)


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


_ANNOTATION = re.compile(r"<<([^<>\n]{3,200})>>")
_NUMBER = r"[$€£]?(?:[0-9]{1,3}(?:,[0-9]{3}){1,5}|[0-9]{1,18})(?:\.[0-9]{1,12})?"
_CHAIN = re.compile(
    rf"(?<![\w.,)^*/+×÷=<>%\\-])"
    rf"({_NUMBER}(?:(?: [-+*/×÷−] |[+*/×÷]){_NUMBER}){{1,12}}) ?= ?"
    rf"(-?{_NUMBER})(?![\w%^(]|[.,]\d| ?[-+*/×÷−^=%\d]| ?\(?mod\b)"
)
_OPEN_BEFORE = re.compile(r"(?:[-–+*/×÷−=^<>()%\d]|(?<![^\W\d_])[xX]|\b(?:mod|base|log|of|from))\s*$")
_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)|([-+*/()%]))")
_BOXED = re.compile(r"\\boxed\s*\{")
_FINAL = re.compile(r"^#### ?(.+)$", re.MULTILINE)
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}")
_LONGEST = 200
_DEEPEST = 20


class NotArithmetic(ValueError):
    """The text is not an arithmetic expression of numbers."""


@dataclass(frozen=True)
class Check:
    """A statement that was verified, as it is written in the text."""

    shown: str
    correct: bool


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of numbers with + - * / ( ); `5%` is 5/100.

    Raises NoArithmetic for anything else, and for a division by 0.
    """
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", expression.strip())
    for odd, plain in (("×", "*"), ("÷", "/"), ("−", "-"), ("$", ""), ("€", ""), ("£", "")):
        text = text.replace(odd, plain)
    if len(text) > _LONGEST:
        raise NotArithmetic(expression[:_LONGEST])
    tokens, place = [], 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if not found:
            raise NotArithmetic(expression)
        tokens.append(found[1] or found[2])
        place = found.end()
    value, rest = _sum(tokens, 0, 0)
    if rest != len(tokens):
        raise NotArithmetic(expression)
    return value


def _sum(tokens: list[str], place: int, depth: int) -> tuple[Fraction, int]:
    value, place = _product(tokens, place, depth)
    while place < len(tokens) and tokens[place] in "+-":
        term, after = _product(tokens, place + 1, depth)
        value, place = value + term if tokens[place] == "+" else value - term, after
    return value, place


def _product(tokens: list[str], place: int, depth: int) -> tuple[Fraction, int]:
    value, place = _factor(tokens, place, depth)
    while place < len(tokens) and tokens[place] in "*/":
        factor, after = _factor(tokens, place + 1, depth)
        if tokens[place] == "/" and not factor:
            raise NotArithmetic("division by zero")
        value, place = value * factor if tokens[place] == "*" else value / factor, after
    return value, place


def _factor(tokens: list[str], place: int, depth: int) -> tuple[Fraction, int]:
    if place >= len(tokens) or depth > _DEEPEST:
        raise NotArithmetic("incomplete")
    token = tokens[place]
    if token in "+-":
        value, place = _factor(tokens, place + 1, depth + 1)
        return -value if token == "-" else value, place
    if token == "(":
        value, place = _sum(tokens, place + 1, depth + 1)
        if place >= len(tokens) or tokens[place] != ")":
            raise NotArithmetic("open bracket")
        place += 1
    elif token[0].isdigit() or token[0] == ".":
        value, place = Fraction(token), place + 1
    else:
        raise NotArithmetic(token)
    if place < len(tokens) and tokens[place] == "%":
        return value / 100, place + 1
    return value, place


def checks(text: str, answer: str | None, chains: bool, tolerance: float) -> Iterator[Check]:
    """Everything that can be verified: `<<a=b>>`; with `chains`, plain equations outside of those; with `answer`, the last box or `####`
    line.
    """
    for found in _ANNOTATION.finditer(text):
        sides = found[1].split("=")
        if len(sides) > 1:
            yield from _equation(sides, found[0], tolerance)
    if chains:
        for found in _CHAIN.finditer(_ANNOTATION.sub(" ", text)):
            if not _OPEN_BEFORE.search(found.string, max(0, found.start() - 12), found.start()):
                yield from _equation([found[1], found[2]], found[0].strip(), tolerance)
    given = final_answer(text) if answer is not None else None
    if answer is not None and given is not None:
        yield Check(f"answer {given!r}, expected {answer!r}", same_answer(given, answer))


def _equation(sides: list[str], shown: str, tolerance: float) -> Iterator[Check]:
    try:
        values = [evaluate(side) for side in sides]
    except (NotArithmetic, ZeroDivisionError):
        return
    rounded = "/" in shown or "÷" in shown or "." in shown or "%" in shown
    allowed = tolerance if rounded else 0.0
    correct = all(_equal(values[0], value, side, allowed) for value, side in zip(values[1:], sides[1:], strict=True))
    yield Check(shown, correct)


def _equal(left: Fraction, right: Fraction, shown: str, tolerance: float) -> bool:
    """Whether the values are equal, or differ by no more than rounding to the digits shown. Integers without a division are not rounded."""
    if left == right or not tolerance:
        return left == right
    digits = len(shown.partition(".")[2].strip(" )"))
    return abs(left - right) <= max(Fraction(tolerance) * abs(left), Fraction(1, 2 * 10**digits) if digits else Fraction(0))


def final_answer(text: str) -> str | None:
    """The content of the last `\\boxed{}`, otherwise the last line `#### answer`; None if there is neither."""
    for found in reversed(list(_BOXED.finditer(text))[-3:]):
        depth = 1
        for place in range(found.end(), min(len(text), found.end() + _LONGEST)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[found.end() : place]
    lines = _FINAL.findall(text)
    return lines[-1].strip() if lines else None


def same_answer(given: str, expected: str) -> bool:
    """Whether two answers are the same number, or the same text apart from LaTeX markup."""
    plain = [_without_markup(one) for one in (given, expected)]
    if plain[0] == plain[1]:
        return True
    try:
        return evaluate(plain[0]) == evaluate(plain[1])
    except NotArithmetic:
        return False


def _without_markup(answer: str) -> str:
    text = _WRAPPED.sub(r"\1", answer)
    text = _FRACTION.sub(r"(\1)/(\2)", text)
    for gone in ("$", "\\!", "\\,", "\\;", "\\ ", "\\left", "\\right", "^\\circ", "^{\\circ}", "\\%", "\\", " "):
        text = text.replace(gone, "")
    return text.rstrip(".").lower()
