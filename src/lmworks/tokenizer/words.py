"""Text to word counts: what byte-pair merging learns from, in memory that has a bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lmworks.tokenizer.merges import GAP


@dataclass
class Words:
    """How often each word occurs; `occurrences` and `lost` say how many were seen, and how many of them forgotten."""

    counts: Counter[str]
    occurrences: int = 0
    lost: int = 0


def count(texts: Iterable[str], pattern: str, most: int) -> Words:
    """Count the pieces into which `pattern` cuts the texts, keeping at most `most` distinct ones.

    When there are more, the rarest are forgotten and count from nothing if they come again (lossy counting, Manku and Motwani 2002).
    """
    import regex

    find = regex.compile(pattern).findall
    words = Words(Counter())
    for text in texts:
        pieces = find(text)
        words.occurrences += len(pieces)
        words.counts.update(pieces)
        if len(words.counts) > most:
            _forget(words, most * 3 // 4)  # not just as many as must be, or every text would forget again
    return words


def _forget(words: Words, most: int) -> None:
    least = sorted(words.counts.values(), reverse=True)[most]
    words.lost += sum(number for number in words.counts.values() if number <= least)
    words.counts = Counter({word: number for word, number in words.counts.items() if number > least})


def laid_out(words: list[str], table: np.ndarray, encoding: str) -> tuple[np.ndarray, np.ndarray]:
    """The words as `merges.learn` wants them: symbols (P,) int32 with a GAP around each word, and the word of each symbol (P,) int32.

    `table` maps units of `encoding` (bytes of utf-8, code points of utf-32-le) to symbol ids, or to GAP where a unit is no symbol.
    """
    unit = np.uint8 if encoding == "utf-8" else np.uint32
    units = np.frombuffer("".join(words).encode(encoding), dtype=unit)
    sizes = np.array([len(word.encode(encoding)) for word in words], dtype=np.int64) // np.dtype(unit).itemsize
    number = np.repeat(np.arange(len(words), dtype=np.int32), sizes)
    place = np.arange(len(units)) + number + 1
    symbols = np.full(len(units) + len(words) + 1, GAP, dtype=np.int32)
    owner = np.zeros(len(symbols), dtype=np.int32)
    symbols[place], owner[place] = table[units], number
    return symbols, owner
