"""The number that a reply gives as its answer.

A statement of the answer takes precedence, and the last of several: `#### 18`, `\\boxed{18}`, `The answer is 18`, `Answer: 18`. Without
one it is the last number of the reply. Only the end of a huge reply is read, and no pattern backtracks over more than a few characters.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

# A minus is a sign only where it does not stand behind something from which it could subtract. Digits are grouped by commas or not.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"(?P<sign>(?<![\w)\]%.])-)?(?:[$€£](?P<minus>-)?)?(?P<digits>{_DIGITS})(?:/(?P<below>[0-9]+))?")
_STATED = re.compile(
    r"####|\\boxed {0,4}\{|\b(?:answer|result)[*_]{0,4} {0,4}(?:(?:is|was|be)\b|[:=])|^[ \t]{0,8}[*_]{0,4}a {0,4}:",
    re.IGNORECASE | re.MULTILINE,
)
_EQUATION = re.compile(r"[-+*/×÷x()$%., 0-9]{0,100}= {0,4}")
_SIGNS = {**dict.fromkeys(map(ord, "−–‒﹣－"), "-"), ord("⁄"): "/"}
_MOST_READ = 100_000  # characters at the end of a reply
_MOST_STATED = 100  # statements at the end of a reply
_LONGEST_LINE = 400  # characters of a statement
_MOST_DIGITS = 60  # longer ones are not answers


@dataclass(frozen=True)
class Stated:
    """A number as it is written, its value, and whether the reply states it as the answer (or it is only the last number)."""

    text: str
    value: Fraction
    stated: bool


def final_number(reply: str) -> Stated | None:
    """The answer of a reply; None if it has no number, or states an answer that has none."""
    text = _plain(reply[-_MOST_READ:])
    for mark in reversed(list(_STATED.finditer(text))[-_MOST_STATED:]):
        line = text[mark.end() : mark.end() + _LONGEST_LINE].lstrip(" *_:=").partition("\n")[0]
        line = line.partition("}")[0] if mark[0].startswith("\\boxed") else line
        if found := _of_statement(line):
            return found
    for match in reversed(list(_NUMBER.finditer(text))):
        if found := _number(match, stated=False):
            return found
    return None


def number(text: str) -> Fraction | None:
    """The value of a text that is a number and nothing else: `18`, `-1,234.5`, `$3`."""
    match = _NUMBER.fullmatch(_plain(text).strip())
    found = _number(match, stated=False) if match else None
    return found.value if found else None


def _of_statement(line: str) -> Stated | None:
    """The number that a statement gives: its first, or the result of the equation that it begins (`5 + 3 = 8 dollars`)."""
    match = _NUMBER.search(line)
    found = _number(match, stated=True) if match else None
    while match and (equation := _EQUATION.match(line, match.end())) and (match := _NUMBER.match(line, equation.end())):
        found = _number(match, stated=True)
    return found


def _number(match: re.Match[str], stated: bool) -> Stated | None:
    digits, below = match["digits"].replace(",", ""), match["below"] or "1"
    if len(digits) > _MOST_DIGITS or len(below) > _MOST_DIGITS or not int(below):
        return None
    value = Fraction(digits) / int(below)
    return Stated(match[0], -value if match["sign"] or match["minus"] else value, stated)


def _plain(text: str) -> str:
    """Full-width digits and the signs for minus and fractions as ASCII, LaTeX's spaces and escapes removed."""
    text = unicodedata.normalize("NFKC", text) if not text.isascii() else text
    text = text.translate(_SIGNS).replace("{,}", ",").replace("\\$", "$").replace("\\%", "%").replace("\\!", "").replace("\\,", "")
    return re.sub(r"\\text\s*\{|\\mathrm\s*\{|\\\(|\\\[", "", text)
