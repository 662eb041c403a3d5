"""A rule: a measure of a document with bounds.

The quality rules of each domain as data: measure, bounds, and the source of the bounds.

The bounds are from Gopher (Rae et al. 2021, table A1), C4 (Raffel et al. 2020, 2.2), FineWeb (Penedo et al. 2024, 3.6) and StarCoder (Li et
al. 2023, 3.1). Rules for English prose would drop all code and all Chinese, so each domain has its own rules, and scripts without spaces
are counted in characters. Bounds marked "ours" were set by inspecting what they drop in the default corpus.

`docs/generated.py` writes docs/rules.md from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Generic, TypeVar

from lmworks.corpus.document import Drop
from lmworks.corpus.transform import rule_measures as m
from lmworks.corpus.transform.rule_measures import STOP_WORDS, Text
from lmworks.errors import UserError
from lmworks.text.letters import SPACELESS_LANGUAGES, main_language, units_per_word

View = TypeVar("View")


@dataclass(frozen=True)
class Rule(Generic[View]):
    """A document is dropped with the reason `name` if its measure is below `low` or above `high`. `source` names the origin of the
    bounds.
    """

    name: str
    measure: Callable[[View], float]
    source: str
    low: float = float("-inf")
    high: float = float("inf")

    def drop(self, doc: View) -> Drop | None:
        """The drop by this rule, with value and limit as its detail; None if the document complies."""
        value = self.measure(doc)
        if self.low <= value <= self.high:
            return None
        return Drop(self.name, f"{value:.4g}, {f'at least {self.low:g}' if value < self.low else f'at most {self.high:g}'}")


def first_broken(doc: View, rules: Sequence[Rule[View]]) -> Drop | None:
    """The drop by the first rule that the document breaks; None if it complies with all."""
    return next((drop for rule in rules if (drop := rule.drop(doc))), None)


_BROKEN = (Rule("replacement_characters", m.replacement_characters, "ours", high=0.001),)

_LINES = (
    Rule("duplicate_lines", m.duplicate_lines, "Gopher", high=0.30),
    Rule("duplicate_line_characters", m.duplicate_line_characters, "Gopher", high=0.20),
    Rule("duplicate_paragraphs", m.duplicate_paragraphs, "Gopher", high=0.30),
    Rule("duplicate_paragraph_characters", m.duplicate_paragraph_characters, "Gopher", high=0.20),
)
_NGRAMS = tuple(Rule(f"top_{n}gram", m.top_ngram(n), "Gopher", high=high) for n, high in ((2, 0.20), (3, 0.18), (4, 0.16))) + tuple(
    Rule(f"repeated_{n}grams", m.repeated_ngrams(n), "Gopher", high=high)
    for n, high in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
)
_SHAPE = (
    Rule("mean_word_length", m.mean_word_length, "Gopher", low=3, high=10),
    Rule("symbols_per_word", m.symbols_per_word, "Gopher", high=0.1),
    Rule("alphabetic_words", m.alphabetic_words, "Gopher", low=0.8),
)
_PROSE = (
    *_BROKEN,
    Rule("word_count", m.word_count, "Gopher", low=50),
    Rule("too_many_words", m.word_count, "Gopher", high=100_000),
    *_SHAPE,
    Rule("stop_words", m.stop_words("en"), "Gopher", low=2),
    Rule("bullet_lines", m.bullet_lines, "Gopher", high=0.9),
    Rule("ellipsis_lines", m.ellipsis_lines, "Gopher", high=0.3),
    *_LINES,
    *_NGRAMS,
)
_WEB = (
    *_PROSE,
    Rule("lorem_ipsum", m.lorem_ipsum, "C4", high=0),
    Rule("curly_braces", m.curly_braces, "C4", high=0),
    Rule("ended_lines", m.ended_lines, "FineWeb", low=0.12),
    Rule("short_lines", m.short_lines(30), "FineWeb", high=0.67),
    Rule("duplicate_line_characters", m.duplicate_line_characters, "FineWeb", high=0.1),
)
_FACTS = (
    *_BROKEN,
    Rule("word_count", m.word_count, "ours", low=20),
    Rule("alphabetic_words", m.alphabetic_words, "ours: dates count as words", low=0.5),
    *_LINES,
)
_CHAT = (
    *_BROKEN,
    Rule("word_count", m.word_count, "ours: a greeting without a reply is not a chat", low=40),
    Rule("alphabetic_words", m.alphabetic_words, "Gopher", low=0.8),
    Rule(
        "tiny_words",
        m.tiny_words,
        "ours: held-down keys; speakers' letters and I'm, I'd are up to 40% of the units of terse chats",
        high=0.45,
    ),
    Rule("dominant_word", m.dominant_word, "ours", high=0.25),
    Rule("duplicate_lines", m.duplicate_lines, "Gopher", high=0.30),
    Rule("top_3gram", m.top_ngram(3), "Gopher", high=0.18),
    Rule("repeated_10grams", m.repeated_ngrams(10), "Gopher", high=0.10),
)
_DIALOGUE = (
    *_BROKEN,
    Rule("word_count", m.word_count, "Gopher", low=50),
    Rule("alphabetic_words", m.alphabetic_words, "ours: tool calls contain numbers", low=0.6),
    Rule("dominant_word", m.dominant_word, "ours", high=0.25),
    *_LINES,
    Rule("repeated_10grams", m.repeated_ngrams(10), "ours: tool schemas repeat themselves", high=0.35),
)
_CODE = (
    *_BROKEN,
    Rule("word_count", m.word_count, "ours", low=10),
    Rule("longest_line", m.longest_line, "StarCoder", high=1000),
    Rule("mean_line", m.mean_line, "StarCoder", high=100),
    Rule("alphanumeric_share", m.alphanumeric_share, "StarCoder", low=0.25),
    Rule("alphabetic_words", m.alphabetic_words, "ours: tables of numbers", low=0.5),
    Rule("generated", m.generated, "StarCoder", high=0),
    Rule("duplicate_line_characters", m.duplicate_line_characters, "ours: the same file repeated inside one document", high=0.6),
    Rule("unparsable", m.unparsable, "ours: code must parse", high=0),
)
_DOCS = (
    *_BROKEN,
    Rule("word_count", m.word_count, "ours", low=20),
    Rule("mean_word_length", m.mean_word_length, "ours: identifiers are long", low=2.5, high=12),
    Rule("alphabetic_words", m.alphabetic_words, "ours", low=0.6),
    Rule("duplicate_paragraphs", m.duplicate_paragraphs, "Gopher", high=0.30),
    Rule("duplicate_line_characters", m.duplicate_line_characters, "ours: signatures and tables repeat", high=0.35),
)
_MATH = (
    *_BROKEN,
    Rule("word_count", m.word_count, "ours", low=10),
    Rule("alphabetic_words", m.alphabetic_words, "ours: mathematics consists of numbers", low=0.2),
    *_LINES,
)
_OTHER = (*_BROKEN, Rule("word_count", m.word_count, "ours", low=5), *_LINES)

_WORD_LENGTH = Rule("mean_word_length", m.mean_word_length, "ours: 1.8 to 15 in 490 languages; Gopher's bounds are for English", 1.7, 18)

# units are characters: lengths in words do not apply, frequent character n-grams are ordinary grammar
_SPACELESS = (
    *_BROKEN,
    Rule("character_count", m.word_count, "Gopher's 50 words, at 1.6 characters per word", low=80),
    Rule("alphabetic_words", m.alphabetic_words, "Gopher", low=0.8),
    Rule("symbols_per_word", m.symbols_per_word, "Gopher", high=0.1),
    Rule("ellipsis_lines", m.ellipsis_lines, "Gopher", high=0.3),
    Rule("dominant_word", m.dominant_word, "ours", high=0.20),
    *_LINES,
    Rule("repeated_20grams", m.repeated_ngrams(20), "Gopher's 10 words, at two characters per word", high=0.15),
)

Rules = tuple[Rule[Text], ...]

RULES: dict[str, Rules] = {
    "prose": _PROSE, "web": _WEB, "facts": _FACTS, "chat": _CHAT, "dialogue": _DIALOGUE, "code": _CODE, "docs": _DOCS, "math": _MATH,
    "other": _OTHER, "spaceless": _SPACELESS, "none": (),
}  # fmt: skip


_WORDS_OF_SHORT_LINE = 5  # 30 letters of English
_RUNNING_TEXT = 40  # minimum words from which a domain counts as running text
_TOP = re.compile(r"top_(\d+)gram")
_UNENDED = frozenset({"th", "lo"})  # languages that end sentences with a space
_ANY_SCRIPT = frozenset(rule.name for rule in (*_BROKEN, *_LINES)) | {"alphabetic_words"}


def _spaceless(domain: str, language: str) -> Rules:
    """The rules of a domain for scripts without spaces: its minimum length in characters, and the rules for running text or those that
    apply to any script.
    """
    own, per_word = RULES[domain], units_per_word(language)
    (least,) = (rule for rule in own if rule.name == "word_count")
    length = replace(least, name="character_count", low=per_word * least.low, high=float("inf"))
    if least.low < _RUNNING_TEXT:
        return (length, *(rule for rule in own if rule.name in _ANY_SCRIPT))
    run = 10 * ceil(per_word)
    again = Rule(f"repeated_{run}grams", m.repeated_ngrams(run), "Gopher's 10 words", high=0.15)
    rules = [length, *(rule for rule in RULES["spaceless"] if rule.name not in ("character_count", "repeated_20grams")), again]
    for rule in own:
        if rule.name == "stop_words" and language in STOP_WORDS:
            share = m.stop_word_share(language)
            rules.append(Rule("stop_word_share", share, "ours: prose has 0.2 to 0.5, lists of words have less", low=0.15))
        elif match := _TOP.fullmatch(rule.name):
            n = round(int(match[1]) * per_word)
            rules.append(replace(rule, name=f"top_{n}gram", measure=m.top_ngram(n), source=f"Gopher's {match[1]} words"))
        elif rule.name == "short_lines":
            short = ceil(_WORDS_OF_SHORT_LINE * per_word)
            rules.append(replace(rule, measure=m.short_lines(short), source=f"FineWeb's 30 letters, as {short} characters"))
        elif rule in _WEB and rule not in _PROSE and not (rule.name == "ended_lines" and language in _UNENDED):
            rules.append(rule)
    return tuple(rules)


@lru_cache(maxsize=256)
def rules_for(name: str | None, domain: str, language: str) -> Rules:
    """The rules named `name`, or those of a domain and language. The stop word rule applies to languages that have a list."""
    language = main_language(language)
    if name is not None:
        if name not in RULES:
            raise UserError(f"unknown rules {name!r}; known are {', '.join(RULES)}")
        return RULES[name]
    if language in SPACELESS_LANGUAGES and domain != "code":
        return _spaceless(domain, language)
    own = m.stop_words(language) if language in STOP_WORDS else None
    own_rules = tuple(
        replace(rule, measure=own) if own and rule.name == "stop_words" else rule
        for rule in RULES[domain]
        if own or rule.name != "stop_words"
    )
    if language in ("en", "code"):
        return own_rules
    return tuple(_WORD_LENGTH if rule.name == "mean_word_length" else rule for rule in own_rules)
