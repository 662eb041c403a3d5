"""Mutants of cosmic-ray that change nothing that can be observed, each with the reason: they are not counted as survivors."""

from __future__ import annotations

from mutants.lines import changed_lines

# module below src/lmworks, the changed lines without and with the mistake, joined by spaces, the reason
EQUIVALENT: list[tuple[str, str, str, str]] = []


def is_equivalent(module: str, before: str, after: str) -> bool:
    difference = tuple(_changed(*texts) for texts in ((before, after), (after, before)))
    return any(module == f"src/lmworks/{one[0]}" and one[1:3] == difference for one in EQUIVALENT)


def _changed(text: str, other: str) -> str:
    first, end = changed_lines(text, other)
    return " ".join(line.strip() for line in text.splitlines()[first - 1 : end - 1])
