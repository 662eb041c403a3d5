"""The forms in which a document is scanned: without markup between its words, with and without short comments, and, if it is full of
escapes, unescaped as well.

Markup is HTML, Markdown, wikitext, LaTeX's commands for fonts and headings, BBCode, reStructuredText's roles, marks of footnotes, URL
encoding, quoted-printable and words broken at the end of a line. Protected text is read in the same way, so what is removed there is not
missed. Every repetition in a pattern is bounded, so time is linear.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html.entities import html5
from urllib.parse import unquote_to_bytes

import numpy as np

_Replacement = Callable[[re.Match[str]], str]
_Pass = tuple[re.Pattern[str], _Replacement]

_TAG = re.compile(
    r"<(?:/?[A-Za-z][A-Za-z0-9:-]{0,30}"
    r"(?:\s{1,40}[\w:@.-]{1,60}(?:\s{0,40}=\s{0,40}(?:\"[^\"<>]{0,500}\"|'[^'<>]{0,500}'|[^\s\"'<>]{1,300}))?){0,20}\s{0,40}/?)>"
)
_CONTENT = re.compile(r"\s(?:d|points|content|alt)\s{0,40}=\s{0,40}(?:\"([^\"]*)\"|'([^']*)')")  # attributes that hold what a tag shows
_COMMENT = re.compile(r"<!--(?:(?!-->|<!--)[\s\S]){0,80}+-->")  # longer ones are text of their own: 13 words have about 80 characters
_EDGE = re.compile(r"_(?<!\w_)_*+|_++(?!\w)")  # underscores that do not join two words: emphasis, or a gap to fill in
_ENTITY = re.compile(r"&(?:amp;){0,3}(#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([nrtbf\"'/\\]))"
)
_FEW = 8  # escapes in a line, up to which it is not taken for JSON
_ESCAPED = ("\\n", '\\"', "\\u", "\\t")
_NESTED = ("\\\\", "\\\\\\\\")  # JSON in JSON, and in JSON again
_PERCENT = re.compile(r"(?:%[0-9A-Fa-f]{2}){1,300}")
_PLUS = re.compile(r"(?<=[^\s+])\+(?=[^\s+])")  # a space in the query of a URL
_QUOTED = re.compile(r"=\r?\n|(?:=[0-9A-F]{2}){1,300}")
_URL = r"[^()\s]{0,500}(?:\([^()\s]{0,100}\)[^()\s]{0,100})?"
_LINK = re.compile(rf"!?\[([^\[\]]{{0,300}})\](?:\({_URL}(?:\s{{1,9}}[\"'][^\"'\n]{{0,200}}[\"'])?\)|\[[^\[\]\n]{{0,60}}\])")
_WIKI = re.compile(r"\[\[(?:[^\[\]|\n]{0,200}\|){0,8}([^\[\]|\n]{0,300})\]\]|\[\[[^\[\]\n]{1,300}\]\[([^\[\]\n]{0,300})\]\]")
_OUTSIDE = re.compile(
    r"\[(?:https?:)?//\S{1,300} {1,9}([^\[\]\n]{0,300})\]|`([^`<\n]{1,300}?) ?<[^<>\s]{1,300}>`_{1,2}|:[a-z:]{1,20}:`([^`\n]{1,300})`"
)
_MARKS = re.compile(
    r"\[(?<!\[\[)(?:(?:\^[^\[\]\s]{1,30}|\d{1,3}(?:[,;–-] ?\d{1,3}){0,9}|[a-z]|(?:note|nb|n) ?\d{1,3}|citation needed|edit)\](?![(\]])"
    r"|/?(?:b|i|u|s|url|img|color|size|font|quote|code|center|left|right|list|li|spoiler|sub|sup)(?:=[^\[\]\n]{0,200})?\](?!\())"
)
_ADDRESS = re.compile(r"<https?://[^<>\s]{1,300}>")
_SUPERSCRIPT = re.compile(r"(?:(?<=[^\W\d_]{2})|(?<=[.,;:!?\"”’)]))[¹²³⁰⁴-⁹]{1,3}(?![\w⁺⁻])")
_EMPHASIS = re.compile(r"\*\*([^*\n]{1,300})\*\*|~~([^~\n]{1,300})~~")
_QUOTE = re.compile(r"^[ \t]{0,3}>[> ]{0,6}", re.MULTILINE)
_COMMANDS = (
    "textbf|textit|emph|underline|texttt|textsc|textrm|textsf|textsl|text|mbox|uline|title|(?:sub){0,2}section|paragraph|caption|footnotesize"
)
_LATEX = re.compile(
    rf"\\(?:{_COMMANDS})\*?\{{([^{{}}]{{0,500}})\}}|\{{\\(?:bf|it|em|tt|sc|sl|rm|bfseries|itshape)(?![a-zA-Z])([^{{}}]{{0,500}})\}}"
    r"|\\(?:begin|end|label|ref|cite[tp]?)\{[^{}]{0,60}\}|\\(?:item|noindent|bfseries|itshape|small|large)(?![a-zA-Z])|\\[ ,;:!]"
)
_HYPHEN = re.compile(r"(?<=[^\W\d_])-[ \t]{0,9}\r?\n[ \t>]{0,9}(?=[^\W\d_])")


def _entity(match: re.Match[str]) -> str:
    name = match[1]
    if name[0] != "#":
        return html5.get(f"{name};", match[0])
    code = int(name[2:], 16) if name[1] in "xX" else int(name[1:])
    return chr(code) if 0 < code < 0x110000 else " "


def _unescaped(match: re.Match[str]) -> str:
    high, low, one, byte, char = match.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if one or byte:
        return chr(int(one or byte, 16))
    return {"n": "\n", "r": " ", "t": " ", "b": " ", "f": " "}.get(char, char)


def _from_percent(match: re.Match[str]) -> str:
    return unquote_to_bytes(match[0]).decode("utf-8", "replace")


def _from_quoted(match: re.Match[str]) -> str:
    return "" if "\n" in match[0] else bytes.fromhex(match[0].replace("=", "")).decode("utf-8", "replace")


def _shown(match: re.Match[str]) -> str:
    return f" {' '.join(map(''.join, _CONTENT.findall(match[0])))} " if "=" in match[0] else " "


def _space(match: re.Match[str]) -> str:
    return " "


def _nothing(match: re.Match[str]) -> str:
    return ""


def _inside(match: re.Match[str]) -> str:
    """The group that matched; a space if none did."""
    return match[match.lastindex] if match.lastindex else " "


def _passes(text: str) -> Iterator[tuple[_Pass, ...]]:
    """The passes of each form. The first, without short comments, is that of protected text. Comments are trained on: documents are also
    scanned with them.
    """
    entities = "&" in text and ";" in text
    tags = entities or any(rest[:1].isalpha() or rest[:1] == "/" for rest in text.split("<")[1:])
    comments = (True, False) if "!--" in text else (False,)
    escapes = text.count("\\")
    dump = escapes > _FEW and (escapes > text.count("\n") or any(line.count("\\") > _FEW for line in text.split("\n")))
    dump = dump and sum(map(text.count, _ESCAPED)) > _FEW
    percent = "%20" in text or text.count("%") > _FEW or ("%" in text and text.count("+") > _FEW)
    quoted = "=\n" in text or "=\r\n" in text
    superscripts = not text.isascii() and any(mark in text for mark in "¹²³⁴⁵⁶⁷⁸⁹")
    for unescape in (False, True) if dump else (False,):
        brackets = unescape or entities or percent or "[" in text
        for comment in comments:
            wanted = (
                (unescape, (_ESCAPE, _unescaped)),
                *((unescape and nested in text, (_ESCAPE, _unescaped)) for nested in _NESTED),
                (quoted, (_QUOTED, _from_quoted)),
                (percent and text.count("+") > _FEW, (_PLUS, _space)),
                (percent, (_PERCENT, _from_percent)),
                (unescape or entities, (_ENTITY, _entity)),
                (comment, (_COMMENT, _space)),
                (brackets, (_MARKS, _space)),
                ("<http" in text, (_ADDRESS, _space)),
                (unescape or tags, (_TAG, _shown)),
                (brackets, (_WIKI, _inside)),
                (brackets and ("](" in text or "][" in text or unescape), (_LINK, _inside)),
                ((brackets and "//" in text) or "`" in text, (_OUTSIDE, _inside)),
                (escapes > 0, (_LATEX, _inside)),
                (escapes > 0 and text.count("{") > 1, (_LATEX, _inside)),  # a command in a command
                ("**" in text or "~~" in text, (_EMPHASIS, _inside)),
                (text.startswith(">") or "\n>" in text, (_QUOTE, _space)),
                (superscripts, (_SUPERSCRIPT, _nothing)),
                (unescape or "-\n" in text or "- \n" in text or "-\r\n" in text, (_HYPHEN, _nothing)),
                (unescape or entities or "_" in text, (_EDGE, _space)),
            )
            yield tuple(one for needed, one in wanted if needed)


def scan_forms(text: str) -> list[str]:
    """The text without markup and short comments, and with its entities decoded. If it has comments, also with them. If it has more escapes
    than line ends, or many in a line, as JSON has, also its unescaped forms.
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


def _replaced(pattern: re.Pattern[str], replacement: _Replacement, text: str, places: np.ndarray) -> tuple[str, np.ndarray]:
    pieces, origins, at = [], [], 0
    for match in pattern.finditer(text):
        new = replacement(match)
        pieces += [text[at : match.start()], new]
        kept = match.span(match.lastindex) if replacement is _inside and match.lastindex else None
        origins += [places[at : match.start()], places[slice(*kept)] if kept else np.full(len(new), places[match.start()])]
        at = match.end()
    return "".join([*pieces, text[at:]]), np.concatenate([*origins, places[at:]])
