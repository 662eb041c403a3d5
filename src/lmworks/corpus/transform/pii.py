"""Keys, tokens and passwords: detected by the prefixes of issuers, by the name that they are assigned to, and private keys as blocks.

Masking of personal data: each value is replaced by a tag for its kind, or by a made-up value that is equal for equal input.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from lmworks.corpus.transform import pii_finders
from lmworks.corpus.transform.pii_finders import without_overlaps
from lmworks.io.masking import ISSUED

_ASSIGNED = re.compile(
    r"(?:api|secret|access|auth|private|client)[_-]?(?:key|token|secret)[\"']? {0,4}(?:=>|[:=：]) {0,4}"
    r"[\"']([A-Za-z0-9+/_=.-]{20,128})[\"']"
    r"|(?:password|passwd|token)[\"']? {0,4}(?:=>|[:=：]) {0,4}[\"']([A-Za-z0-9+/_=.!@$%^&*-]{12,128})[\"']",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD)(?:_ID)?[=：:] ?([A-Za-z0-9+/_=.-]{20,128})(?![A-Za-z0-9+/_=.(\[{$@\\%<-])")
_SIGNS = (
    "AKIA", "ASIA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "sk-", "AIza", "hf_", "k_live_", "SG.", "npm_",
    "pypi-AgEI", "eyJ",
)  # fmt: skip
_NAMES = ("key", "token", "secret", "password", "passwd")
_VALUE = re.compile(r"[:=>：] {0,4}[\"'][A-Za-z0-9+/_=.!@$%^&*-]{12}")
_PLACEHOLDER = re.compile(r"example|your|xxxx|test|dummy|change|sample|placeholder|secret|password|1234567|abcdef|fake|0000", re.IGNORECASE)
_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,16} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_BODY = re.compile(  # of a key without an end line
    r"\s{0,4}[A-Za-z0-9+/=]{40,80}(?:\r?\n[A-Za-z0-9+/=]{40,80}){1,400}(?:\r?\n[A-Za-z0-9+/=]{1,80}(?![^\r\n]))?"
)
_LONGEST_BLOCK = 1 << 14
_NOWHERE = -2
_LEAST_ENTROPY = 3.2  # bits per character; English identifiers of that length are below, random base 64 is above


def entropy(text: str) -> float:
    """Shannon entropy of the characters, in bits per character."""
    total = len(text)
    return -sum(count / total * math.log2(count / total) for count in Counter(text).values())


def secrets(text: str) -> Iterator[tuple[int, int]]:
    """The spans of secrets. Values that look like placeholders (example, your-key, test) are kept."""
    spans = [*_blocks(text)]
    signed = any(sign in text for sign in _SIGNS)
    for found in ISSUED.finditer(text) if signed else ():
        if not _PLACEHOLDER.search(found[0]) and _looks_random(found[0]):
            spans.append(found.span())
    assigned = _VALUE.search(text) is not None and any(name in text.lower() for name in _NAMES)
    for found in _ASSIGNED.finditer(text) if assigned else ():
        group = 1 if found[1] else 2
        if not _PLACEHOLDER.search(found[group]) and _looks_random(found[group]):
            spans.append(found.span(group))
    for found in _VARIABLE.finditer(text) if any(name.upper() in text for name in _NAMES) else ():
        if not _PLACEHOLDER.search(found[1]) and _looks_random(found[1]):
            spans.append(found.span(1))
    yield from without_overlaps(spans)


def _looks_random(value: str) -> bool:
    return any(map(str.isdigit, value)) and any(map(str.isalpha, value)) and entropy(value) >= _LEAST_ENTROPY


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    if "PRIVATE KEY" not in text:
        return
    close = -1
    reached = 0
    for begin in _BEGIN.finditer(text):
        if begin.start() < reached:
            continue
        if close < begin.end() and close != _NOWHERE:
            close = text.find("-----END ", begin.end())
            close = close if close >= 0 else _NOWHERE
        end = text.find("-----", close + 9, close + 80) if 0 <= close - begin.end() <= _LONGEST_BLOCK else -1
        if end > 0 and close - begin.end() > 100:
            reached = end + 5
            yield begin.start(), reached
        elif end < 0 and (body := _BODY.match(text, begin.end())):
            reached = body.end()
            yield begin.start(), reached


FINDERS: dict[str, pii_finders.Finder] = {
    "secret": secrets,
    "email": pii_finders.emails,
    "iban": pii_finders.ibans,
    "card": pii_finders.cards,
    "phone": pii_finders.phones,
    "ip": pii_finders.ips,
    "street": pii_finders.streets,
}
"""Kind to finder, in the order in which they are applied: longer and more certain kinds first."""

_TAGS = tuple(f"<{kind.upper()}>" for kind in FINDERS)
_ROUNDS = 4
_MADE_UP: dict[str, Callable[[int], str]] = {  # the finder of each kind ignores the made-up value
    "secret": lambda number: f"secret_{number:016x}",
    "email": lambda number: f"user{number % 100_000}@example.com",
    "iban": lambda number: f"XX00 {number % 10_000:04d} {number // 10_000 % 10_000:04d} {number // 10**8 % 10_000:04d}",
    "card": lambda number: "4111 1111 1111 1111",
    "phone": lambda number: f"+1 202 555 01{number % 100:02d}",
    "ip": lambda number: f"{('192.0.2', '198.51.100', '203.0.113')[number % 3]}.{1 + number // 3 % 254}",
    "street": lambda number: f"{1 + number % 999} Example Street",
}


def mask(text: str, kinds: Iterable[str], made_up: bool = False) -> tuple[str, dict[str, int]]:
    """The text with everything masked that the finders of `kinds` find, and the counts per kind.

    A match next to a tag is not masked, because it was part of something longer. The search is repeated, because a mask can expose another
    match. The function is idempotent.
    """
    chosen = [kind for kind in FINDERS if kind in set(kinds)]
    counts = dict.fromkeys(chosen, 0)
    for _ in range(_ROUNDS):
        found, form = 0, pii_finders.ascii_form(text)
        for kind in chosen:
            text, form, count = _mask(text, form, kind, made_up)
            counts[kind] += count
            found += count
        if not found:
            break
    return text, counts


def _mask(text: str, form: str, kind: str, made_up: bool) -> tuple[str, str, int]:
    """The text and its ASCII form with items of one kind masked, and their number."""
    pieces: list[str] = []
    forms: list[str] = []
    end, count = 0, 0
    for start, stop in FINDERS[kind](form):
        if form.endswith(_TAGS, 0, start) or form.startswith(_TAGS, stop):
            continue
        new = _made_up_value(form[start:stop], kind) if made_up else f"<{kind.upper()}>"
        pieces += [text[end:start], new]
        forms += [form[end:start], new]
        end = stop
        count += 1
    return ("".join([*pieces, text[end:]]), "".join([*forms, form[end:]]), count) if count else (text, form, 0)


def _made_up_value(value: str, kind: str) -> str:
    number = int.from_bytes(hashlib.blake2b(value.lower().encode(), digest_size=8).digest(), "little")
    if kind == "ip" and ":" in value:
        return f"2001:db8::{number % 0xFFFF:x}"
    return _MADE_UP[kind](number)
