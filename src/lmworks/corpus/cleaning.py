"""Mending of text that is the same for every domain: Unicode form, line ends, invisible characters."""

from __future__ import annotations

import re
import unicodedata

# everything that is rarely there: control characters, odd spaces and line ends, zero-width and soft hyphens, direction overrides
# (which can make code read other than it runs, CVE-2021-42574)
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\xa0\xad\u2000-\u200b\u2028-\u202f\u205f-\u206f\ufeff\ufff9-\ufffb]")
_LINE_ENDS = re.compile("\r\n?|[\x0b\x85\u2028\u2029]")
_SPACES = re.compile("[\xa0\u2000-\u200a\u202f\u205f]")
_BLANK = re.compile(r"\n{4,}")
# UTF-8 that was decoded as Windows-1252 or Latin-1 (two such characters in a row), Mac Roman, or Windows-1251: cheap signs, after which a
# slower look decides
_SUSPECT = re.compile(
    "[\xc2-\xf4][\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]|‚Ä|√[©®†°¢§•¶ßüº∂¥´ªÅ]|ďż˝|(?:[РС][\u0400-\u040f\u0450-\u04ff‚„…†‡€‰‹‘’“”•–—™›\xa0-\xbf]){2}"
)
_ROUNDS = 4


def unmangle(text: str) -> str:
    """The text with each line mended that reads like UTF-8 decoded as another encoding (`schÃ¶n`), by ftfy's heuristic.

    Lines without a sign of it are not looked at; that makes it cheap.
    """
    if text.isascii() or not _SUSPECT.search(text):
        return text
    import ftfy

    return "\n".join(ftfy.fix_encoding(line) if _SUSPECT.search(line) else line for line in text.split("\n"))


def clean(text: str, mojibake: bool = False) -> str:
    """`tidy`, after `unmangle` on request, until nothing changes any more: what was mended may hold something to mend."""
    for _ in range(_ROUNDS if mojibake else 0):
        before, text = text, tidy(unmangle(text))
        if text == before:
            return text
    return tidy(text)


def tidy(text: str) -> str:
    """The text in NFC with `\\n` line ends, ordinary spaces, no invisible characters, no trailing blanks, at most two blank lines together.

    Joiners that carry meaning (U+200C, U+200D) and marks that give a direction (U+200E, U+200F) stay. Applying it twice changes
    nothing more.
    """
    if _ODD.search(text):
        text = _LINE_ENDS.sub("\n", text)
        text = _SPACES.sub(" ", text)
        text = _ODD.sub("", text)
    if not text.isascii() and not unicodedata.is_normalized("NFC", text):
        text = unicodedata.normalize("NFC", text)
    if " \n" in text or "\t\n" in text or text.endswith((" ", "\t")):
        text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    return _BLANK.sub("\n\n\n", text).strip("\n")


def encodable(text: str) -> bool:
    """Whether the text is Unicode at all; JSON can smuggle in halves of surrogate pairs."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def fingerprint_form(text: str) -> str:
    """The form in which two documents are the same one: case folded, runs of white space as one space."""
    return " ".join(text.lower().split())
