"""Byte-pair merges from word counts (Sennrich et al. 2016, arXiv:1508.07909), in numpy. Words are counted in bounded memory.

All words are in one array, separated by gaps. A merge joins all occurrences of its pair at once and updates the counts of the pairs beside
them. The merges equal those of `tokenizers`' trainer (a test compares them), but are computed from counts instead of text: memory grows
with the distinct words, about 30 bytes per symbol, and no count overflows 32 bits, as pair counts there do on large samples.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

GAP, _DEAD = -1, -2  # between words; the right half of a merged pair
_SHIFT = 32  # a pair (a, b) is the key a << 32 | b, which sorts as the pair does


def learn_merges(symbols: np.ndarray, words: np.ndarray, counts: np.ndarray, lengths: Sequence[int], most: int, longest: int,
          advance: Callable[[int], object] = lambda done: None) -> list[tuple[int, int]]:
    """Up to `most` merges: the most frequent pair first, among equals the one with the lower ids. Pairs that occur once are not merged.

    `symbols` (P,) int32: the symbol ids of the words, with one GAP before, between and after them; changed in place. `words` (P,) int32:
    the word of each symbol. `counts` (W,) int64: how often each word occurs. `lengths`: bytes of each symbol; no merge is longer than
    `longest` bytes. Merge number n makes the symbol len(lengths) + n.
    """
    places = len(symbols)
    left, right = np.arange(-1, places - 1, dtype=np.int32), np.arange(1, places + 1, dtype=np.int32)
    fresh = np.zeros(places, dtype=bool)
    sizes = list(lengths)
    totals: dict[int, int] = {}
    where: dict[int, np.ndarray] = {}
    heap: list[tuple[int, int]] = []

    def add_pairs(at: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
        """Add pairs (first, second) at their places."""
        keys = first.astype(np.int64) << _SHIFT | second
        order = np.argsort(keys, kind="stable")
        keys, at = keys[order], at[order]
        starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
        sums = np.add.reduceat(counts[words[at]], starts)
        for key, total, group in zip(keys[starts].tolist(), sums.tolist(), np.split(at, starts[1:]), strict=True):
            if total > 1 and sizes[key >> _SHIFT] + sizes[key & 0xFFFFFFFF] <= longest:
                totals[key], where[key] = total, group
                heapq.heappush(heap, (-total, key))

    def subtract_pairs(first: np.ndarray, second: np.ndarray, weights: np.ndarray) -> None:
        """Subtract pairs that a merge has removed."""
        keys = first.astype(np.int64) << _SHIFT | second
        if len(keys) > 64:  # below, summing in numpy costs more than it saves
            keys, parts = np.unique(keys, return_inverse=True)
            weights = np.bincount(parts, weights).astype(np.int64)
        for key, weight in zip(keys.tolist(), weights.tolist(), strict=True):
            if key in totals:
                totals[key] -= weight

    at = np.flatnonzero((symbols[:-1] >= 0) & (symbols[1:] >= 0)).astype(np.int32)
    if len(at):
        add_pairs(at, symbols[at], symbols[at + 1])
    merges: list[tuple[int, int]] = []
    while heap and len(merges) < most:
        negative, key = heapq.heappop(heap)
        if totals[key] != -negative:  # other merges have removed some of its occurrences since
            if totals[key] > 1:
                heapq.heappush(heap, (-totals[key], key))
            continue
        a, b = key >> _SHIFT, key & 0xFFFFFFFF
        at = where.pop(key)
        del totals[key]
        at = at[(symbols[at] == a) & (symbols[right[at]] == b)]
        if a == b:
            at = _without_overlaps(at, right)
        new = len(sizes)
        merges.append((a, b))
        sizes.append(sizes[a] + sizes[b])
        halves, weights = right[at], counts[words[at]]
        before, behind = left[at], right[halves]
        symbols[halves] = _DEAD
        beside = symbols[before]  # dead if the symbol before is merged too: that pair is subtracted once, from its left
        subtract_pairs(beside[beside >= 0], np.full(int((beside >= 0).sum()), a), weights[beside >= 0])
        beside = symbols[behind]
        subtract_pairs(np.full(int((beside >= 0).sum()), b), beside[beside >= 0], weights[beside >= 0])
        symbols[at], right[at], left[behind] = new, behind, at
        fresh[at] = True
        before, behind = left[at], right[at]
        ahead, follows = (symbols[before] >= 0) & ~fresh[before], symbols[behind] >= 0
        fresh[at] = False
        new_at = np.concatenate([before[ahead], at[follows]])
        if len(new_at):
            add_pairs(new_at, symbols[new_at], symbols[right[new_at]])
        advance(1)
    return merges


def _without_overlaps(at: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Of overlapping places (a pair of equal symbols in a run) the first, third and so on."""
    if len(at) < 2:
        return at
    at = np.sort(at)
    number = np.arange(len(at))
    starts = np.r_[True, at[1:] != right[at[:-1]]]
    return at[(number - np.maximum.accumulate(np.where(starts, number, 0))) % 2 == 0]


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
