"""Text that is public because the sources of lmworks contain it: words, and the messages that a run writes as templates.

A template is the constant parts of an f-string, such as ("", " is in use by process ", ""): a message fits if it has these parts in this
order, and what stands between them is judged on its own. So a message can be kept without what a run has filled into it.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import lmworks
from lmworks.bundle.foreign_messages import MESSAGES, WORDS

Template = tuple[str, ...]

_LITERAL = r'"(?:[^"\\\n]|\\.)*"'
_STRINGS = re.compile(rf'"""[\s\S]*?"""|(?:[rbf]{{0,2}}{_LITERAL})(?:\s+[rbf]{{0,2}}{_LITERAL})*')
_ONE = re.compile(rf"([rbf]{{0,2}})({_LITERAL})")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_ESCAPES = {"\\n": "\n", "\\t": "\t", '\\"': '"', "\\\\": "\\", "\\'": "'"}
_WORD = re.compile(r"(?<![^\W\d_])[^\W\d_]{3,}(?![^\W\d_])")
_FEWEST_LETTERS = 8  # of the constant parts of a template
_LONGEST_WORD = 120


@cache
def words() -> frozenset[str]:
    """Identifiers and short string constants of the sources: keys, values, events, metrics, codes, names of functions."""
    found = set(WORDS)
    for text in _sources():
        found.update(_IDENTIFIER.findall(text))
    found.update(parts[0] for parts in _all_literals() if len(parts) == 1 and len(parts[0]) <= _LONGEST_WORD)
    return frozenset(found)


@cache
def known_messages() -> Messages:
    """The messages of the sources, of the operating system, and those of libraries that `foreign_messages` lists."""
    own = {_merged(parts) for parts in _all_literals()}
    foreign = {tuple(message.split("{}")) for message in MESSAGES}
    system: set[Template] = set()
    for number in errno.errorcode:
        text = os.strerror(number)
        system |= {(text,), (f"[Errno {number}] {text}",), (f"[Errno {number}] {text}: ", ""), ("", f": {text}")}
    return Messages(own | foreign | system)


class Messages:
    """Templates, found by the rarest word of their constant parts."""

    def __init__(self, templates: Iterable[Template]) -> None:
        usable = sorted(one for one in templates if sum(len(word) for part in one for word in _WORD.findall(part)) >= _FEWEST_LETTERS)
        counts = Counter(word for one in usable for word in _anchors(one))
        self._by_word: dict[str, list[Template]] = defaultdict(list)
        for one in usable:
            if candidates := _anchors(one):
                self._by_word[min(candidates, key=lambda word: (counts[word], word))].append(one)

    def fit(self, text: str) -> tuple[Template, list[str]] | None:
        """The template with the longest constant parts that a text fits, and what stands between them."""
        best: tuple[Template, list[str]] | None = None
        for word in sorted(set(_WORD.findall(text))):
            for template in self._by_word.get(word, ()):
                if best is not None and _constant_length(template) <= _constant_length(best[0]):
                    continue
                filled = _between(template, text)
                if filled is not None:
                    best = template, filled
        return best


def _constant_length(template: Template) -> int:
    """Characters of the constant parts."""
    return sum(map(len, template))


def _between(template: Template, text: str) -> list[str] | None:
    """What a text has between the parts, each part taken where it comes first: linear in the text, whatever it holds."""
    if len(template) == 1:
        return [] if text == template[0] else None
    if not text.startswith(template[0]) or not text.endswith(template[-1]):
        return None
    place, end, filled = len(template[0]), len(text) - len(template[-1]), []
    for part in template[1:-1]:
        found = text.find(part, place, end)
        if found < 0:
            return None
        filled.append(text[place:found])
        place = found + len(part)
    return [*filled, text[place:end]] if place <= end else None


def _anchors(template: Template) -> list[str]:
    """Words that any text of the template has as whole words: not at the border to what is filled in."""
    found = []
    for number, part in enumerate(template):
        for match in _WORD.finditer(part):
            if (match.start() or not number) and (match.end() < len(part) or number == len(template) - 1):
                found.append(match[0])
    return found


def _merged(template: Template) -> Template:
    """Without parts that any text has, such as a space between two values: the two become one."""
    inner = [part for part in template[1:-1] if part.strip(" :,;\n")]
    return (template[0], *inner, template[-1]) if len(template) > 1 else template


@cache
def _all_literals() -> frozenset[Template]:
    return frozenset(parts for text in _sources() for parts in _literals(text))


@cache
def _sources() -> Sequence[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(Path(lmworks.__file__).parent.rglob("*.py"))]


def _literals(text: str) -> Iterator[Template]:
    """The string constants and f-strings of a source, adjacent ones joined. Found by their form, ten times faster than by the parser."""
    for match in _STRINGS.finditer(text):
        if match[0].startswith('"""'):
            continue
        parts = [""]
        for one in _ONE.finditer(match[0]):
            inner = one[2][1:-1]
            if "f" in one[1]:
                first, *rest = _split(inner)
                parts[-1] += first
                parts += rest
            else:
                parts[-1] += _unescaped(inner)
        yield tuple(parts)


def _split(inner: str) -> list[str]:
    """The constant parts of an f-string."""
    parts, depth, place = [""], 0, 0
    while place < len(inner):
        character = inner[place]
        if depth == 0 and inner[place : place + 2] in ("{{", "}}"):
            parts[-1] += character
            place += 1
        elif character == "{":
            depth += 1
            if depth == 1:
                parts.append("")
        elif character == "}" and depth:
            depth -= 1
        elif depth == 0:
            parts[-1] += character
        place += 1
    return [_unescaped(part) for part in parts]


def _unescaped(text: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), text)
