"""One item of RULER at any size, and the largest size that fits a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_FIRST = 64  # units of haystack from which the tokens per unit are known well enough


@dataclass(frozen=True)
class Draft:
    """An item before it has a length.

    `render(size)` is its text with so many units of haystack (words, sentences, entries, ...), and `prefix` the beginning of the answer,
    which RULER writes for the model. A larger size only adds to the haystack: needles, question and answers stay the same. `least` is the
    smallest size that holds them, and `most` the largest, if there is one.
    """

    render: Callable[[int], str]
    prefix: str
    answers: tuple[str, ...]
    least: int
    most: int | None = None


def largest(length: Callable[[int], int], limit: int, least: int, most: int | None = None) -> int | None:
    """The largest size from `least` to `most` with `length(size) <= limit`; None if even `least` is too long.

    `length` should grow with the size. If it does not everywhere, the result still fits, but a larger size might fit too. Sizes are
    guessed from the tokens per unit so far, so that a long text is encoded only a few times.
    """
    low, low_length = least, length(least)
    if low_length > limit or low == most:
        return low if low_length <= limit else None
    high: int | None = None  # a size that is too long
    guess = least + _FIRST
    while high is None or high - low > 1:
        size = max(low + 1, guess if high is None else min(guess, high - 1))
        size = size if most is None else min(size, most)
        found = length(size)
        per_unit = max((found - low_length) / (size - low), 1e-6)
        if found <= limit:
            low, low_length = size, found
            if size == most:
                return low
        else:
            high = size
        step = int((limit - low_length) / per_unit)
        if high is not None and step >= high - low:  # the guess does not narrow the range: halve it
            step = (high - low) // 2
        guess = low + max(1, step)
    return low
