"""Text normalization for every domain: Unicode form, line ends, invisible characters."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

# one search for everything unusual: control characters, unusual spaces and line ends, zero-width and soft hyphens, direction overrides
# (with which code can look different from what it does, CVE-2021-42574)
_UNUSUAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\xa0\xad\u2000-\u200b\u2028-\u202f\u205f-\u206f\ufeff\ufff9-\ufffb]")
# Scripts without spaces may use a zero-width space as a word boundary: it is kept next to Thai, Lao, Burmese, Khmer or Tibetan letters.
_NO_SPACES = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1980-\u19ff\ua9e0-\ua9ff\uaa60-\uaa7f]")
_ZERO_WIDTH = re.compile("\u200b+")
_LINE_ENDS = re.compile("\r\n?|[\x0b\x85\u2028\u2029]")
_SPACES = re.compile("[\xa0\u2000-\u200a\u202f\u205f]")
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")
_BLANK = re.compile(r"\n{4,}")
_ROUNDS = 4
_ENCODINGS = ("cp1252", "cp1250", "cp1254", "cp1257", "iso8859-2", "mac-roman", "cp437")
# C1 control characters: letters and quotes of a DOS or Windows code page that were decoded as Latin-1.
_CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")
_DOS_LETTERS = frozenset(bytes((*range(0x80, 0x85), *range(0x86, 0x8A), 0x8B, 0x8D, 0x8F, 0x90, 0x93, 0x94, 0x95, 0x98, 0x99, 0x9B, 0x9D)))


def fix_mojibake(text: str) -> str:
    """Repair lines of UTF-8 that was decoded with another encoding (`schÃ¶n`), by ftfy's heuristic.

    Only lines with two successive bytes of UTF-8, as one of ftfy's encodings shows them, are passed to ftfy. This keeps the cost low.
    """
    if text.isascii() or not any(pattern.search(text) for pattern in _mojibake_patterns()):
        return text
    from ftfy import fix_encoding

    patterns = _mojibake_patterns()
    return "\n".join(fix_encoding(line) if any(one.search(line) for one in patterns) else line for line in text.split("\n"))


@lru_cache(maxsize=1)
def _mojibake_patterns() -> tuple[re.Pattern[str], ...]:
    """Patterns for the first byte of a UTF-8 character followed by a continuation byte, as each encoding shows them.

    In Cyrillic and Greek code pages most first bytes are common letters. For these the pattern is two successive pairs, or one pair whose
    first byte is that of Latin letters or of quotation marks.
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
    """Apply `normalize`, with `mojibake` after `fix_mojibake`, repeatedly until nothing changes: a repair can expose more to repair."""
    for _ in range(_ROUNDS if mojibake else 0):
        before, text = text, normalize(fix_mojibake(text))
        if text == before:
            return text
    return normalize(text)


def normalize(text: str) -> str:
    """The text in NFC with `\\n` line ends, ordinary spaces, no invisible characters, no trailing blanks, and at most two successive blank
    lines.

    Joiners (U+200C, U+200D), direction marks (U+200E, U+200F), and zero-width spaces (U+200B) in scripts that mark word boundaries with
    them, such as Thai and Khmer, are kept. The function is idempotent.
    """
    if _UNUSUAL.search(text):
        text = _CONTROLS.sub(_decode_c1_control, text)
        text = _LINE_ENDS.sub("\n", text)
        text = _SPACES.sub(" ", text)
        text = _INVISIBLE.sub("", text)
        text = _ZERO_WIDTH.sub(_keep_word_boundary, text)
    if not text.isascii() and not unicodedata.is_normalized("NFC", text):
        text = unicodedata.normalize("NFC", text)
    if " \n" in text or "\t\n" in text or text.endswith((" ", "\t")):
        text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    return _BLANK.sub("\n\n\n", text).strip("\n")


def _keep_word_boundary(match: re.Match[str]) -> str:
    """A zero-width space if it is a word boundary, otherwise nothing."""
    beside = match.string[max(match.start() - 1, 0) : match.start()] + match.string[match.end() : match.end() + 1]
    return "\u200b" if _NO_SPACES.search(beside) else ""


def _decode_c1_control(match: re.Match[str]) -> str:
    """The character that a C1 control character was before decoding: a letter of code page 850 between two letters where Windows-1252 has a
    symbol, otherwise the character of Windows-1252 (as the WHATWG decodes Latin-1); nothing if neither has one.
    """
    text, place, byte = match.string, match.start(), match[0].encode("latin-1")
    between = 0 < place < len(text) - 1 and text[place - 1].isalpha() and text[place + 1].isalpha()
    return byte.decode("cp850" if between and byte[0] in _DOS_LETTERS else "cp1252", "ignore")


def comparison_form(text: str) -> str:
    """The text in lower case with each run of white space as one space. Documents with equal forms are duplicates."""
    return " ".join(text.lower().split())
