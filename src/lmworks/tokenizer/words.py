"""Word counts in bounded memory: the input of byte-pair merging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lmworks.tokenizer.merges import GAP


@dataclass
class WordCounts:
    """How often each word occurs. `occurrences` is how many words were seen, `lost` how many of them were dropped."""

    counts: Counter[str]
    occurrences: int = 0
    lost: int = 0


def count_words(texts: Iterable[str], pattern: str, most: int) -> WordCounts:
    """Count the pieces into which `pattern` cuts the texts, keeping at most `most` distinct ones.

    When there are more, the rarest are dropped and counted from 0 if they occur again (lossy counting, Manku and Motwani 2002).
    """
    import regex

    find = regex.compile(pattern).findall
    words = WordCounts(Counter())
    for text in texts:
        pieces = find(text)
        words.occurrences += len(pieces)
        words.counts.update(pieces)
        if len(words.counts) > most:
            _drop_rarest(words, most * 3 // 4)  # fewer than `most`, or every further text would drop words again
    return words


def _drop_rarest(words: WordCounts, most: int) -> None:
    least = sorted(words.counts.values(), reverse=True)[most]
    words.lost += sum(number for number in words.counts.values() if number <= least)
    words.counts = Counter({word: number for word, number in words.counts.items() if number > least})


def to_symbols(words: list[str], table: np.ndarray, encoding: str) -> tuple[np.ndarray, np.ndarray]:
    """The words as symbols (P,) int32 with a GAP around each word, and the index of the word of each symbol (P,) int32.

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
