"""The forms in which a document is scanned: without markup between its words, with and without short comments, and, if it is full of
escapes, unescaped as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html.entities import html5

import numpy as np

_Pass = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]

_TAG = re.compile(
    r"<(?:/?[A-Za-z][A-Za-z0-9:-]{0,30}"
    r"(?:\s{1,40}[\w:@.-]{1,60}(?:\s{0,40}=\s{0,40}(?:\"[^\"<>]{0,500}\"|'[^'<>]{0,500}'|[^\s\"'<>]{1,300}))?){0,20}\s{0,40}/?)>"
)
_COMMENT = re.compile(r"<!--(?:(?!-->|<!--)[\s\S]){0,80}+-->")  # longer ones are text of their own: 13 words have about 80 characters
_EDGE = re.compile(r"(?<!\w)_++|_++(?!\w)")  # underscores that do not join two words: emphasis, or a gap to fill in
_ENTITY = re.compile(r"&(?:amp;){0,3}(#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_ESCAPE = re.compile(r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|([nrtbf\"'/\\]))")
_ESCAPED = ("\\n", '\\"', "\\u", "\\t")


def _entity(match: re.Match[str]) -> str:
    name = match[1]
    if name[0] != "#":
        return html5.get(f"{name};", match[0])
    code = int(name[2:], 16) if name[1] in "xX" else int(name[1:])
    return chr(code) if 0 < code < 0x110000 else " "


def _unescaped(match: re.Match[str]) -> str:
    high, low, one, char = match.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    return chr(int(one, 16)) if one else {"n": "\n", "r": " ", "t": " ", "b": " ", "f": " "}.get(char, char)


def _space(match: re.Match[str]) -> str:
    return " "


def _passes(text: str) -> Iterator[tuple[_Pass, ...]]:
    """The passes of each form. The first, without short comments, is that of protected text. Comments are trained on: documents are also
    scanned with them.
    """
    entities = "&" in text and ";" in text
    tags = entities or any(rest[:1].isalpha() or rest[:1] == "/" for rest in text.split("<")[1:])
    comments = (True, False) if "!--" in text else (False,)
    escapes = text.count("\\")
    dump = escapes and escapes > (lines := text.count("\n")) and sum(map(text.count, _ESCAPED)) > lines
    for unescape in (False, True) if dump else (False,):
        for comment in comments:
            wanted = (
                (unescape, (_ESCAPE, _unescaped)),
                (unescape or entities, (_ENTITY, _entity)),
                (comment, (_COMMENT, _space)),
                (unescape or tags, (_TAG, _space)),
                (unescape or entities or "_" in text, (_EDGE, _space)),
            )
            yield tuple(one for needed, one in wanted if needed)


def scan_forms(text: str) -> list[str]:
    """The text without short comments, tags and underscores at the edges of words, and with its entities decoded. If it has comments,
    also with them. If it has more escapes than line ends, as JSON files have, also its unescaped forms.
    """
    found = []
    for passes in _passes(text):
        read = text
        for pattern, replacement in passes:
            read = pattern.sub(replacement, read)
        found.append(read)
    return found


def scan_forms_with_positions(text: str) -> list[tuple[str, np.ndarray]]:
    """Like `scan_forms`, each form with the position in the text of each of its characters: (C,) int64."""
    found = []
    for passes in _passes(text):
        read, places = text, np.arange(len(text))
        for pattern, replacement in passes:
            read, places = _replaced(pattern, replacement, read, places)
        found.append((read, places))
    return found


def _replaced(
    pattern: re.Pattern[str], replacement: Callable[[re.Match[str]], str], text: str, places: np.ndarray
) -> tuple[str, np.ndarray]:
    pieces, origins, at = [], [], 0
    for match in pattern.finditer(text):
        new = replacement(match)
        pieces += [text[at : match.start()], new]
        origins += [places[at : match.start()], np.full(len(new), places[match.start()])]
        at = match.end()
    return "".join([*pieces, text[at:]]), np.concatenate([*origins, places[at:]])
