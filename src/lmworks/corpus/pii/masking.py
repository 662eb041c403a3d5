"""Masking of personal data: each value is replaced by a tag for its kind, or by a made-up value that is equal for equal input."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from lmworks.corpus.pii import finders
from lmworks.corpus.pii.secrets import secrets

FINDERS: dict[str, finders.Finder] = {
    "secret": secrets,
    "email": finders.emails,
    "iban": finders.ibans,
    "card": finders.cards,
    "phone": finders.phones,
    "ip": finders.ips,
    "street": finders.streets,
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
        found, form = 0, finders.ascii_form(text)
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
