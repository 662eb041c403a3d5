"""Writes docs/rules.md from the rules: `python -m lmworks.corpus.rules.reference > docs/rules.md`."""

from __future__ import annotations

from collections.abc import Iterator

from lmworks.corpus.rules.rule import Rule
from lmworks.corpus.rules.stop_words import STOP_WORDS
from lmworks.corpus.rules.table import RULES, rules_for
from lmworks.corpus.rules.text import Text
from lmworks.letters import SPACELESS_LANGUAGES

_SCRIPTS = ("prose", "facts", "math", "other")
_HEAD = """# Quality rules

The step `rules` drops a document that breaks a rule of its source. The rules follow from the source's `domain` and
language. `rules: NAME` on a source selects the rules NAME below instead, for any language; `rules: none` drops nothing.
A rule's name is the reason in the table of `lmworks corpus prepare`, in `corpus sample --reason NAME`, and in `corpus trace`, which shows
the value and the limit. Published rule sets (`sets: [gopher, c4, fineweb]` of the step) are applied exactly as published instead.

This page is made from the code: `python -m lmworks.corpus.rules.reference`.
"""
_SPACELESS = """
## Chinese, Japanese, Thai and other scripts without spaces

Units are characters with their marks: 1.6 per word in Chinese, 1.7 in Japanese, 2.2 in Burmese, 3.2 in Thai, Lao and Khmer. Minimum
lengths and the lengths of repeated runs are those of the domain times these. Domains of running text (at least 40 words) use the other
rules of `spaceless`, the domain's limits for its most frequent runs of 2 to 4 words, and occurrences of function words per word; `web`
also those for the shape of lines. Other domains use those of their own rules that apply to any script. The minimum lengths in Chinese:
"""
_LANGUAGES = """
## Other languages than English

The rules of the domain apply, with two changes. Words may be 1.7 to 18 letters long on average. `stop_words` counts the function words of
the language, and does not apply if there is no list for it; lists exist for {languages}.
"""


def page() -> str:
    """The page in Markdown."""
    return "\n".join(_lines()).rstrip("\n") + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    for name, rules in RULES.items():
        yield f"## `{name}`\n"
        if not rules:
            yield "No rules.\n"
            continue
        yield "| rule | at least | at most | from |\n|---|---|---|---|"
        yield from (_row(rule) for rule in rules)
        yield ""
    yield _LANGUAGES.format(languages=", ".join(sorted(set(STOP_WORDS) - SPACELESS_LANGUAGES)))
    yield _SPACELESS
    yield "| domain | characters |\n|---|---|"
    for name in _SCRIPTS:
        (least,) = (rule for rule in rules_for(None, name, "zh") if rule.name == "character_count")
        yield f"| `{name}` | {least.low:g} |"


def _row(rule: Rule[Text]) -> str:
    low, high = (f"{bound:g}" if abs(bound) != float("inf") else "" for bound in (rule.low, rule.high))
    return f"| `{rule.name}` | {low} | {high} | {rule.source} |"


if __name__ == "__main__":
    print(page(), end="")
