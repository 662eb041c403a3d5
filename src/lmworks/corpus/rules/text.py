"""One document as input of the rules: its text, lines, paragraphs and units, each computed on first use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lmworks.corpus.units import Units

_PARAGRAPH = re.compile(r"\n{2,}")


@dataclass(frozen=True)
class Text:
    """A document. `hashes`, `lengths`, `letters` are per unit (a word, or a character in scripts without spaces).

    `python` is true for Python code.
    """

    text: str
    hashes: np.ndarray
    lengths: np.ndarray
    letters: np.ndarray
    python: bool = False

    @classmethod
    def of(cls, batch: Units, document: int, text: str, python: bool = False) -> Text:
        span = slice(batch.bounds[document], batch.bounds[document + 1])
        return cls(text, batch.hashes[span], batch.lengths[span], batch.letters[span], python)

    @cached_property
    def lines(self) -> list[str]:
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        return [part for part in map(str.strip, _PARAGRAPH.split(self.text)) if part]

    @cached_property
    def characters(self) -> int:
        """Number of characters in units: the denominator of the fractions of repeated n-grams."""
        return int(self.lengths.sum())
