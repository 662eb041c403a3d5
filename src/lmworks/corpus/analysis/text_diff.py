"""The lines of a text that a step changed, in a short form."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import takewhile

MAX_LINES = 3000  # longer texts take too long to compare line by line
_AROUND = 60


def changed_lines(before: str, after: str, most: int = 12) -> list[str]:
    """Removed lines (`- `), added lines (`+ `) and changed lines (both); of each, an excerpt around the first difference. At most `most`
    lines.
    """
    old, new = before.split("\n"), after.split("\n")
    head = _common_prefix(old, new)
    tail = _common_prefix(old[head:][::-1], new[head:][::-1])
    old, new = old[head : len(old) - tail], new[head : len(new) - tail]
    if len(old) + len(new) > MAX_LINES:
        return [f"{len(old):,} lines were replaced by {len(new):,}, from line {head + 1:,} on"]
    shown: list[str] = []
    for kind, first, last, begin, end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            shown += _diff_lines(old[first:last], new[begin:end])
    more = len(shown) - most
    return shown if more <= 0 else [*shown[:most], f"... and {more:,} more lines"]


def _diff_lines(old: list[str], new: list[str]) -> list[str]:
    found = []
    for place in range(max(len(old), len(new))):
        gone, come = old[place] if place < len(old) else None, new[place] if place < len(new) else None
        at = 0
        if gone is not None and come is not None:
            at = _common_prefix(gone, come)
        found += [f"{sign} {_excerpt(line, at)}" for sign, line in (("-", gone), ("+", come)) if line is not None]
    return found


def _common_prefix(old: Sequence[str], new: Sequence[str]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))


def _excerpt(line: str, at: int) -> str:
    if not line:
        return "(empty line)"
    start, stop = max(0, at - _AROUND // 2), at + _AROUND
    return ("..." if start else "") + line[start:stop] + ("..." if stop < len(line) else "")
