"""Print a page, or a part of one, that is made from the code: python docs/generated.py rules > docs/rules.md

`rules` is docs/rules.md; `ablations` are the keys of all kinds in docs/ablations.md; `coming-from` is docs/coming-from.md with the keys of
other tools between its markers; `troubleshooting` is docs/troubleshooting.md with the causes of the doctor between its markers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from lmworks.ablate.file import Ablation
from lmworks.ablate.kinds import kinds
from lmworks.corpus.transform.rule_measures import STOP_WORDS, Text
from lmworks.corpus.transform.rule_table import RULES, Rule, rules_for
from lmworks.doctor.answers import ANSWERS, REFUSED
from lmworks.recipe.names import FOREIGN
from lmworks.text.letters import SPACELESS_LANGUAGES
from lmworks.watch.diagnosis import all_rules
from lmworks.watch.rule import SYMPTOMS

_SCRIPTS = ("prose", "facts", "math", "other")
_HEAD = """# Quality rules

The step `rules` drops a document that breaks a rule of its source. The rules follow from the source's `domain` and
language. `rules: NAME` on a source selects the rules NAME below instead, for any language; `rules: none` drops nothing.
A rule's name is the reason in the table of `lmworks corpus prepare`, in `corpus sample --reason NAME`, and in `corpus trace`, which shows
the value and the limit. Published rule sets (`sets: [gopher, c4, fineweb]` of the step) are applied exactly as published instead.

This page is made from the code: `python docs/generated.py rules`.
"""
_SCRIPTS_WITHOUT_SPACES = """
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


def rules() -> str:
    """docs/rules.md."""
    return "\n".join(_lines()).rstrip("\n")


def _lines() -> Iterator[str]:
    yield _HEAD
    for name, own in RULES.items():
        yield f"## `{name}`\n"
        if not own:
            yield "No rules.\n"
            continue
        yield "| rule | at least | at most | from |\n|---|---|---|---|"
        yield from (_rule(rule) for rule in own)
        yield ""
    yield _LANGUAGES.format(languages=", ".join(sorted(set(STOP_WORDS) - SPACELESS_LANGUAGES)))
    yield _SCRIPTS_WITHOUT_SPACES
    yield "| domain | characters |\n|---|---|"
    for name in _SCRIPTS:
        (least,) = (rule for rule in rules_for(None, name, "zh") if rule.name == "character_count")
        yield f"| `{name}` | {least.low:g} |"


def _rule(rule: Rule[Text]) -> str:
    low, high = (f"{bound:g}" if abs(bound) != float("inf") else "" for bound in (rule.low, rule.high))
    return f"| `{rule.name}` | {low} | {high} | {rule.source} |"


def ablations() -> str:
    """The keys of all kinds of ablations, in docs/ablations.md."""
    common = Ablation.model_fields
    lines = [_KEYS, *(_key(name, field) for name, field in common.items() if name != "kind")]
    for name, kind in kinds().items():
        own = {key: field for key, field in kind.model_fields.items() if key not in common}
        text = " ".join((kind.__doc__ or "").split())
        lines += ["", f"### `kind: {name}`", "", text, "", _KEYS, *(_key(key, field) for key, field in own.items())]
    return "\n".join(lines)


_KEYS = "| key | default | meaning |\n|---|---|---|"


def _key(name: str, field: object) -> str:
    default, needed = getattr(field, "default", None), getattr(field, "is_required", lambda: False)()
    factory = getattr(field, "default_factory", None)
    value = factory() if factory else default
    shown = "required" if needed else "" if value is None or value in ([], {}) else f"`{value}`"
    return f"| `{name}` | {shown} | {getattr(field, 'description', '')} |"


def coming_from() -> str:
    """docs/coming-from.md, with a table of the keys of each tool between the markers of its name."""
    text = (Path(__file__).parent / "coming-from.md").read_text(encoding="utf-8")
    for tool, keys in FOREIGN.items():
        rows = [f"| `{key}` | {', '.join(f'`{path}`' for path in ours.keys)} | {ours.note} |" for key, ours in sorted(keys.items())]
        head, tail = f"<!-- {tool} -->", f"<!-- end of {tool} -->"
        before, rest = text.split(head)
        text = "\n".join([f"{before}{head}", "| key | here | note |", "|---|---|---|", *rows, tail + rest.split(tail)[1]])
    return text.rstrip("\n")


_BY_SYMPTOM = """## Symptoms and causes

`lmworks doctor RUN` judges all of these causes on the records of a run, and rules out those that look alike. Where a cause is not in its
answer, the last lines say which checks could not run. `lmworks doctor --explain CODE` prints what this page says of a cause.
"""
_GUIDE = """## Issues of other guides

The issues and causes of a widely copied guide, and who answers each here.

| issue | cause | answered by |
|---|---|---|"""
_REFUSED = """## Advice that is not ours

| advice | why not |
|---|---|"""


def troubleshooting() -> str:
    """docs/troubleshooting.md, with what the doctor's rules declare between the markers."""
    text = (Path(__file__).parent / "troubleshooting.md").read_text(encoding="utf-8")
    head, tail = "<!-- causes -->", "<!-- end of causes -->"
    before, rest = text.split(head)
    return "\n".join([f"{before}{head}", *_causes(), tail + rest.split(tail)[1]]).rstrip("\n")


def _causes() -> Iterator[str]:
    rules_by_code = all_rules()
    yield _BY_SYMPTOM
    for symptom, words in SYMPTOMS.items():
        found = [rule for rule in rules_by_code.values() if symptom in rule.symptoms]
        yield f"### {words}\n"
        yield "| code | cause |\n|---|---|"
        yield from (f"| {_link(rule.code)} | {rule.sentence} |" for rule in found)
        yield ""
    yield "## Causes\n"
    for code, rule in rules_by_code.items():
        yield f"### `{code}`\n"
        yield f"{rule.sentence} {rule.explain}\n"
        for other, tells in rule.look_alikes.items():
            yield f"- Not {_link(other) if other in rules_by_code else f'`{other}`'}: that {tells}."
        if rule.needs:
            yield f"- Judged by {', '.join(f'`{name}`' for name in rule.needs)}."
        if rule.look_alikes or rule.needs:
            yield ""
    yield _GUIDE
    for answer in ANSWERS:
        parts = [", ".join(_link(code) for code in answer.codes), answer.elsewhere]
        yield f"| {answer.issue} | {answer.cause} | {'; '.join(part for part in parts if part)} |"
    yield ""
    yield _REFUSED
    yield from (f"| {advice} | {why} |" for advice, why in REFUSED)
    yield ""


def _link(code: str) -> str:
    return f"[`{code}`](#{code})"


PARTS = {"rules": rules, "ablations": ablations, "coming-from": coming_from, "troubleshooting": troubleshooting}

if __name__ == "__main__":
    print(PARTS[sys.argv[1]]())
