"""Mending of text that is the same for every domain: Unicode form, line ends, invisible characters."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

# everything that is rarely there: control characters, odd spaces and line ends, zero-width and soft hyphens, direction overrides
# (which can make code read other than it runs, CVE-2021-42574)
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\xa0\xad\u2000-\u200b\u2028-\u202f\u205f-\u206f\ufeff\ufff9-\ufffb]")
# A zero-width space is a word border in scripts that write no other: it stays beside a letter of Thai, Lao, Burmese, Khmer or Tibetan.
_BORDERS = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1980-\u19ff\ua9e0-\ua9ff\uaa60-\uaa7f]")
_ZERO_WIDTH = re.compile("\u200b+")
_LINE_ENDS = re.compile("\r\n?|[\x0b\x85\u2028\u2029]")
_SPACES = re.compile("[\xa0\u2000-\u200a\u202f\u205f]")
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")
_BLANK = re.compile(r"\n{4,}")
_ROUNDS = 4
_ENCODINGS = ("cp1252", "cp1250", "cp1254", "cp1257", "iso8859-2", "mac-roman", "cp437")
# Bytes of a code page for DOS or Windows that were decoded as Latin-1: letters and quotes that look like control characters.
_CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")
_DOS_LETTERS = frozenset(bytes((*range(0x80, 0x85), *range(0x86, 0x8A), 0x8B, 0x8D, 0x8F, 0x90, 0x93, 0x94, 0x95, 0x98, 0x99, 0x9B, 0x9D)))


def unmangle(text: str) -> str:
    """The text with each line mended that reads like UTF-8 decoded as another encoding (`schÃ¶n`), by ftfy's heuristic.

    Lines without two bytes of UTF-8 in a row, as one of ftfy's encodings shows them, are not looked at; that makes it cheap.
    """
    if text.isascii() or not any(suspect.search(text) for suspect in _suspects()):
        return text
    from ftfy import fix_encoding

    return "\n".join(fix_encoding(line) if any(suspect.search(line) for suspect in _suspects()) else line for line in text.split("\n"))


@lru_cache(maxsize=1)
def _suspects() -> tuple[re.Pattern[str], ...]:
    """Patterns for the first byte of a character in UTF-8 and one that goes on with it, in each encoding.

    What Cyrillic and Greek code pages make of most first bytes are common letters: of these two pairs in a row are wanted, and one where
    the first byte is that of Latin letters or of quotation marks.
    """

    def shown(encoding: str, first: int, last: int) -> str:
        return re.escape("".join(bytes([byte]).decode(encoding, "ignore") or chr(byte) for byte in range(first, last)))

    leads = {encoding: shown(encoding, 0xC2, 0xF5) for encoding in _ENCODINGS}
    pairs = "|".join(f"(?<=[{lead}])[{shown(encoding, 0x80, 0xC0)}]" for encoding, lead in leads.items())
    found = [f"[{''.join(leads.values())}](?:{pairs})", "√[©®†°¢§•¶ßüº∂¥´ªÅ]|‚Ä"]
    for encoding in ("cp1251", "cp1253"):
        after = f"[{shown(encoding, 0x80, 0xC0)}]"
        wide = f"[{shown(encoding, 0xC2, 0xF5)}]{after}"
        found += [wide + wide, f"[{shown(encoding, 0xC2, 0xC6)}{shown(encoding, 0xE2, 0xE3)}]{after}"]
    return tuple(map(re.compile, found))


def clean(text: str, mojibake: bool = False) -> str:
    """`tidy`, after `unmangle` on request, until nothing changes any more: what was mended may hold something to mend."""
    for _ in range(_ROUNDS if mojibake else 0):
        before, text = text, tidy(unmangle(text))
        if text == before:
            return text
    return tidy(text)


def tidy(text: str) -> str:
    """The text in NFC with `\\n` line ends, ordinary spaces, no invisible characters, no trailing blanks, at most two blank lines together.

    Joiners that carry meaning (U+200C, U+200D), marks that give a direction (U+200E, U+200F), and word borders (U+200B) of scripts
    that write no other, such as Thai and Khmer, stay. Applying it twice changes
    nothing more.
    """
    if _ODD.search(text):
        text = _CONTROLS.sub(_as_letter, text)
        text = _LINE_ENDS.sub("\n", text)
        text = _SPACES.sub(" ", text)
        text = _INVISIBLE.sub("", text)
        text = _ZERO_WIDTH.sub(_border, text)
    if not text.isascii() and not unicodedata.is_normalized("NFC", text):
        text = unicodedata.normalize("NFC", text)
    if " \n" in text or "\t\n" in text or text.endswith((" ", "\t")):
        text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    return _BLANK.sub("\n\n\n", text).strip("\n")


def _border(match: re.Match[str]) -> str:
    """A zero-width space where it is a border between words, nothing elsewhere."""
    beside = match.string[max(match.start() - 1, 0) : match.start()] + match.string[match.end() : match.end() + 1]
    return "\u200b" if _BORDERS.search(beside) else ""


def _as_letter(match: re.Match[str]) -> str:
    """What a C1 control character was before its encoding was mistaken: a letter of code page 850 between two letters, where that of
    Windows is a sign, and else what Windows-1252 has (as the WHATWG reads Latin-1); nothing, where neither has one.
    """
    text, place, byte = match.string, match.start(), match[0].encode("latin-1")
    between = 0 < place < len(text) - 1 and text[place - 1].isalpha() and text[place + 1].isalpha()
    return byte.decode("cp850" if between and byte[0] in _DOS_LETTERS else "cp1252", "ignore")


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
