"""Letters, words, sentence ends and the folded form of text in all scripts: one definition for rules, comparison, fertility and the gate.

The properties are Unicode's, from `regex`. A letter includes its marks (vowel signs, viramas, accents). A word is a run of letters, digits
and underscores, as in UAX 29, except that an apostrophe or a point inside a word separates, because copies of a text differ in them. In
scripts without spaces between words (Han, kana, Thai, Lao, Khmer, Burmese) each grapheme cluster, a character with its marks, is a unit;
`units_per_word` says how many of them carry as much as a word. Decisions about documents use only these, so that they do not depend on a
dictionary. `words` finds the words of all scripts with ICU's dictionaries, where words are what is measured.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import lru_cache

import regex

PLANES = 0x33480
"""One past the last assigned letter."""

SPACELESS = (
    r"[[\p{Line_Break=SA}\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\u30FC\uFF70]&&[\p{L}\p{Nl}\p{No}]"
    r"--\p{GCB=Extend}--\p{GCB=SpacingMark}]"
)
"""Characters that are units of their own (a pattern of `regex`, version 1)."""
ATTACHED = r"[\p{Line_Break=SA}&&[\p{M}\p{GCB=Extend}\p{GCB=SpacingMark}]\u3099\u309A]"
"""Marks of such a character, which belong to its unit."""
LETTER, MARK, DIGIT, SYMBOL = r"[\p{L}\p{M}]", r"\p{M}", r"\p{N}", r"[\p{S}\p{P}]"

_UNITS_PER_WORD = {"Han": 1.6, "Hiragana": 1.7, "Thai": 3.2, "Lao": 3.2, "Khmer": 3.2, "Myanmar": 2.2}
"""Grapheme clusters per word of ICU's dictionaries in the Universal Declaration of Human Rights: Cantonese 1.56, Chinese 1.66, Japanese
1.78, Thai 3.08, Lao 3.20, Khmer 3.18, Burmese 2.19.
"""
_SCRIPT_OF_LANGUAGE = {
    "zh": "Han", "yue": "Han", "wuu": "Han", "gan": "Han", "hak": "Han", "hsn": "Han", "lzh": "Han", "ja": "Hiragana", "th": "Thai",
    "lo": "Lao", "km": "Khmer", "my": "Myanmar", "shn": "Myanmar", "mnw": "Myanmar",
}  # fmt: skip
SPACELESS_LANGUAGES = frozenset(_SCRIPT_OF_LANGUAGE)
_ALIASES = {"nb": "no", "nn": "no", "iw": "he", "in": "id", "cmn": "zh", "jp": "ja", "bs": "sr", "prs": "fa"}
_SPACELESS_SCRIPT = {name: regex.compile(rf"\p{{Script={name}}}") for name in _UNITS_PER_WORD}

_OMITTED = regex.compile(
    r"(?V1)[\p{Default_Ignorable_Code_Point}\p{Cf}\u0640"
    r"[\p{Mn}&&[\p{Script=Inherited}\p{Script=Latin}\p{Script=Greek}\p{Script=Cyrillic}\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}]"
    r"--[\u3099\u309A]]]"
)
"""What a writer may leave out: invisible characters, the bar that stretches Arabic words, accents and vowel points."""
COMPOSED = regex.compile(r"[\u3040-\u30FF\uFF66-\uFF9D][\u3099\u309A\uFF9E\uFF9F]|[\u1100-\u11FF\uA960-\uA97C\uD7B0-\uD7FB\uFFA0-\uFFDC]+")
"""Sequences that fold to one character only as a whole: voiced kana in two characters, Hangul syllables in parts."""
COMPOSING = r"[\u3099\u309A\uFF9E\uFF9F\u1100-\u11FF\uA960-\uA97C\uD7B0-\uD7FB\uFFA0-\uFFDC]"
FOLDED = (
    r"[[\P{NFKD_Quick_Check=Yes}\p{Changes_When_Casefolded}\p{Nd}\p{Default_Ignorable_Code_Point}\p{Cf}\p{Mn}\u0640ıیىک]--[\uAC00-\uD7A3]]"
)
"""All characters that may differ from their folded form."""
_LONE = frozenset("\u0E33\u0EB3").union(map(chr, range(0x3131, 0x318F)))  # vowels of Thai and Lao with a part above; Hangul letters
_WORDLIKE = regex.compile(r"[\p{L}\p{M}\p{N}]")
# Turkish I and i differ by a dot in other places than elsewhere; Persian text is also typed with Arabic letters
_SAME = {ord("ı"): "i", ord("ی"): "ي", ord("ى"): "ي", ord("ک"): "ك"}


@lru_cache(maxsize=1)
def _characters() -> str:
    return "".join(chr(code) for code in range(PLANES) if not 0xD800 <= code < 0xE000)


def characters(pattern: str) -> list[str]:
    """All characters that a pattern for one character matches (`regex`, version 1)."""
    return regex.findall(f"(?V1){pattern}", _characters())


SENTENCE_ENDS = frozenset(characters(r"\p{Sentence_Terminal}"))
"""Characters that end a sentence: full stops, question and exclamation marks of all scripts."""


def _is_line_end(char: str) -> bool:
    name = unicodedata.name(char, "")
    if char in SENTENCE_ENDS or char in "\"'…":
        return True
    if unicodedata.category(char) in ("Pe", "Pf"):
        return any(part in name for part in ("QUOTATION", "PARENTHESIS", "CORNER BRACKET"))
    return "COMMA" not in name


LINE_ENDS = frozenset(filter(_is_line_end, characters(r"[\p{Terminal_Punctuation}\p{Pe}\p{Pf}\"'…]")))
"""Characters at the end of a line that ends like a sentence: ends of sentences, colons, closing quotes and parentheses."""


def main_language(tag: str) -> str:
    """The language of a tag without region and script, such as `zh` of `zh-Hant` and `zh_TW`."""
    main = tag.replace("_", "-").split("-", 1)[0].lower()
    return _ALIASES.get(main, main)


def units_per_word(language: str) -> float:
    """How many units carry as much as a word in a language: 1 if words are separated by spaces."""
    return _UNITS_PER_WORD[_SCRIPT_OF_LANGUAGE[language]] if language in _SCRIPT_OF_LANGUAGE else 1.0


def spaceless_language(text: str) -> str:
    """A language that is written in the most frequent script without spaces of a text; empty if there is none."""
    counts = {name: len(pattern.findall(text)) for name, pattern in _SPACELESS_SCRIPT.items()}
    most = max(counts, key=counts.__getitem__)
    return next(language for language, script in _SCRIPT_OF_LANGUAGE.items() if script == most) if counts[most] else ""


@lru_cache(maxsize=1 << 16)
def fold_character(char: str) -> str:
    """The folded form of a character; empty if writers may omit it.

    Letters, marks and digits: compatibility decomposition, case folding and decimal digits as ASCII, without what writers omit. Symbols:
    the ASCII character of a full-width form.
    """
    if char in _LONE:
        return char
    if (digit := unicodedata.decimal(char, None)) is not None:
        return str(digit)
    kind = unicodedata.category(char)[0]
    if kind not in "LNM":
        whole = unicodedata.normalize("NFKC", char) if kind in "SP" else char
        return "" if _OMITTED.match(char) else whole if len(whole) == 1 and unicodedata.category(whole)[0] in "SP" else char
    form, before = char, ""
    while form != before:
        before, form = form, unicodedata.normalize("NFKD", form).casefold()
    return unicodedata.normalize("NFC", _OMITTED.sub("", form).translate(_SAME))


def fold(text: str) -> str:
    """The text in the form in which texts are compared."""
    composed = COMPOSED.sub(lambda found: unicodedata.normalize("NFKC", found[0]), text)
    return composed.lower() if text.isascii() else "".join(map(fold_character, composed))


def words(text: str, language: str = "") -> Iterator[tuple[int, int]]:
    """(start, end) of each word that has a letter, mark or digit, by UAX 29, with ICU's dictionaries in scripts without spaces."""
    from icu4py.breakers import WordBreaker

    for start, end in WordBreaker(text, language or "en").segments():
        if _WORDLIKE.search(text, start, end):
            yield start, end
