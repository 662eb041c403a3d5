"""Text to word hashes, vectorized over many documents in numpy: the one tokenization for rules, near-duplicates and contamination.

A unit is a run of letters, digits, marks and underscores, case folded. In scripts written without spaces (Han, kana, Thai, Lao, Khmer,
Burmese) each character is a unit. So an n-gram of units consists of words or of characters, depending on the script.

Punctuation and markup do not matter in prose, but some text consists of operators, brackets and emoji. With `symbols` each symbol is a
unit, too: in lines that have at least one symbol per three words or no word at all (`symbols="lines"`), or in the whole text
(`symbols="all"`). Commas, quotes and semicolons are never units; full stops, colons and dashes are, but do not make a line symbolic. In
lines, each symbol that follows seven others gets the hash of all eight: there are few distinct symbols, so sets of short runs of them are
similar in unrelated texts.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

SPACELESS_LANGUAGES = frozenset({"zh", "ja", "th", "lo", "km", "my"})
_PLANES = 0x33480  # one past the last assigned letter; code points above are separators
_SPACELESS = (
    (0x0E00, 0x0F00),
    (0x1000, 0x10A0),
    (0x1780, 0x1800),
    (0x3005, 0x3008),
    (0x3021, 0x302A),
    (0x3031, 0x3036),
    (0x303B, 0x303D),
    (0x3040, 0x3100),
    (0x31F0, 0x3200),
    (0x3400, 0x4DC0),
    (0x4E00, 0xA000),
    (0xF900, 0xFB00),
    (0xFF66, 0xFFA0),
    (0x20000, 0x33480),
)
_WORD, _SINGLE, _LETTER, _SYMBOL, _MARK = 1, 2, 4, 8, 16  # bits of the kind of a code point; a separator has none
_UNIT = _WORD | _SINGLE
_IGNORED = frozenset(",;'\"`´‘’‚‛“”„‟‹›«»¿¡、。，；：？！…")  # typographic punctuation, which differs between copies of the same text
_MARKS = frozenset(".:?!-‐‑‒–—―·•")
_WORDS_PER_SYMBOL = 3
Symbols = Literal["", "lines", "all"]
_NEWLINE = 10
_STRETCH = 64
_RUN = 8
_BLOCK = 1 << 15
_ODD = 0x9E3779B97F4A7C15
STEP = np.uint64(0xD6E8FEB86659FD93)


def mix(x: np.ndarray) -> np.ndarray:
    """Mix the bits of 64-bit values (the finalizer of SplitMix64, Steele 2014). In place; returns its argument."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@lru_cache(maxsize=1)
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, bytes]:
    """Per code point its kind and the hash of the folded letter (0 for separators), without symbols and with them; and the kinds of ASCII
    for `bytes.translate`.
    """
    kinds = np.zeros(_PLANES, dtype=np.uint8)
    folded = np.arange(_PLANES, dtype=np.uint64)
    for code in range(_PLANES):
        char = chr(code)
        category = unicodedata.category(char)
        if 0xFE00 <= code <= 0xFE0F:  # variation selectors
            continue
        if category[0] in "LNM" or char == "_":
            kinds[code] = _WORD | (_LETTER if category[0] == "L" else 0)
            lower = char.lower()
            if len(lower) == 1:
                folded[code] = ord(lower)
        elif category[0] in "SP" and char not in _IGNORED and not 0x3000 <= code < 0x3040:
            kinds[code] = _MARK if char in _MARKS else _SYMBOL
    for start, stop in _SPACELESS:
        span = kinds[start:stop]
        span[:] = np.where(span & _WORD, span ^ (_WORD | _SINGLE), 0)
    values = mix((folded + np.uint64(1)) * np.uint64(_ODD))
    return kinds, np.where(kinds & _UNIT > 0, values, 0), np.where(kinds > 0, values, 0), kinds[:256].tobytes()


@lru_cache(maxsize=1)
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """Powers 0 to 2^15 of STEP and of its inverse modulo 2^64."""
    steps = np.full((2, _BLOCK + 1), STEP, dtype=np.uint64)
    steps[1] = pow(int(STEP), -1, 1 << 64)
    steps[:, 0] = 1
    forth, back = np.multiply.accumulate(steps, axis=1)
    return forth, back


@dataclass(frozen=True)
class Units:
    """The units of several documents. Document d has units `bounds[d]:bounds[d+1]`; starts and ends are code points in its own text."""

    hashes: np.ndarray  # (U,) uint64
    starts: np.ndarray  # (U,) int64
    ends: np.ndarray  # (U,) int64
    letters: np.ndarray  # (U,) number of letters in the unit
    single: np.ndarray  # (U,) bool, a character of a script without spaces
    bounds: np.ndarray  # (D+1,) int64

    @cached_property
    def lengths(self) -> np.ndarray:
        return self.ends - self.starts

    @property
    def documents(self) -> int:
        return len(self.bounds) - 1

    def hashes_of(self, document: int) -> np.ndarray:
        """The hashes of one document's units."""
        return self.hashes[self.bounds[document] : self.bounds[document + 1]]


def units(texts: Sequence[str], symbols: Symbols = "") -> Units:
    """Split texts into hashed units, vectorized over all texts; see the module docstring for `symbols`."""
    _, values_of, symbol_values_of, _ = _tables()
    codes, kinds, firsts = _classify(texts)
    word, single = (kinds & _WORD).view(bool), kinds & _SINGLE > 0
    if symbols:
        left = kinds & (_SYMBOL | _MARK) > 0
        if symbols == "lines":
            codes = np.where(left & ~_in_symbolic_lines(codes, kinds), np.uint32(_NEWLINE), codes)
            left &= codes != _NEWLINE
        single, values_of = single | left, symbol_values_of
    opening, closing = word.copy(), word.copy()
    opening[1:] &= ~word[:-1]
    closing[:-1] &= ~word[1:]
    opening |= single
    closing |= single
    starts, ends = np.flatnonzero(opening), np.flatnonzero(closing) + 1
    bounds = np.append(np.searchsorted(starts, firsts), len(starts))
    offset = np.repeat(firsts, np.diff(bounds))
    others = np.flatnonzero((kinds & _LETTER == 0) & (word | single))  # digits, marks, underscores, symbols
    letters = ends - starts - np.bincount(np.searchsorted(starts, others, side="right") - 1, minlength=len(starts))
    hashes = _hashes(codes, starts, values_of)
    if symbols == "lines":
        _hash_symbol_runs(hashes, kinds[starts] & (_SYMBOL | _MARK) > 0, bounds)
    return Units(hashes, starts - offset, ends - offset, letters, single[starts], bounds)


def _classify(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The texts joined with line ends as (code points, their kinds), and the start of each text: (C,), (C,), (D,)."""
    kinds_of, _, _, ascii_kinds = _tables()
    joined = "\n".join(texts)
    if joined.isascii():
        raw = joined.encode("ascii")
        codes, kinds = np.frombuffer(raw, dtype=np.uint8), np.frombuffer(raw.translate(ascii_kinds), dtype=np.uint8)
    else:
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        codes = np.minimum(codes, np.uint32(_PLANES - 1))
        kinds = kinds_of[codes]
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    return codes, kinds, np.cumsum(lengths + 1) - (lengths + 1)


def _in_symbolic_lines(codes: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """(C,) bool: the symbols of lines that consist of symbols, except those before the first word (bullets, quote marks).

    A line that repeats one symbol is a rule and does not count.
    """
    ends = np.flatnonzero(codes == _NEWLINE)
    lines = np.zeros(len(codes), dtype=np.int64)
    lines[ends] = 1
    np.cumsum(lines, out=lines)
    words = np.cumsum(_word_starts(kinds))
    before = np.concatenate(([0], words[ends]))
    count = len(ends) + 1
    per_line = np.diff(np.append(before, words[-1] if len(words) else 0))
    places = np.flatnonzero(kinds & (_SYMBOL | _MARK))
    of_line = lines[places]
    counted = (words[places] > before[of_line]) | (per_line[of_line] == 0)
    places, of_line = places[counted], of_line[counted]
    strong = np.bincount(of_line[kinds[places] == _SYMBOL], minlength=count)
    symbolic = (strong > 0) & (strong * _WORDS_PER_SYMBOL >= per_line)
    several = np.zeros(count, dtype=bool)
    several[of_line[1:][(of_line[1:] == of_line[:-1]) & (codes[places[1:]] != codes[places[:-1]])]] = True
    symbolic &= several | (per_line > 0)
    found = np.zeros(len(codes), dtype=bool)
    found[places[symbolic[of_line]]] = True
    return found


def symbolic(texts: Sequence[str]) -> np.ndarray:
    """(D,) bool: which texts have at least one symbol per three words."""
    strong, words = _count_symbols_and_words(texts)
    return (strong > 0) & (strong * _WORDS_PER_SYMBOL >= words)


def mostly_symbols(texts: Sequence[str]) -> np.ndarray:
    """(D,) bool: which texts have more symbols than words."""
    strong, words = _count_symbols_and_words(texts)
    return strong > words


def _count_symbols_and_words(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(D,) number of symbols and (D,) number of words of each text."""
    if not texts:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    _, kinds, firsts = _classify([*texts, ""])
    return (
        np.add.reduceat(kinds == _SYMBOL, firsts[:-1], dtype=np.int64),
        np.add.reduceat(_word_starts(kinds), firsts[:-1], dtype=np.int64),
    )


def symbolic_stretches(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(S,) texts and (S,) positions in them of stretches of 64 characters that have at least 16 symbols, each different from its
    predecessor, and four times as many symbols as words.
    """
    codes, kinds, firsts = _classify([*texts, " " * _STRETCH])
    changing = kinds >= _SYMBOL
    changing[1:] &= codes[1:] != codes[:-1]
    run_hash = len(kinds) // _STRETCH * _STRETCH
    strong = np.add.reduce(changing[:run_hash].reshape(-1, _STRETCH), axis=1, dtype=np.uint8)
    found = np.flatnonzero(strong >= 16)
    words = np.add.reduce(_word_starts(kinds)[:run_hash].reshape(-1, _STRETCH)[found], axis=1, dtype=np.uint8)
    middles = found[strong[found] >= words * np.uint8(4)] * _STRETCH + _STRETCH // 2
    numbers = np.minimum(np.searchsorted(firsts, middles, side="right"), len(texts)) - 1
    return numbers, middles - firsts[numbers]


def _word_starts(kinds: np.ndarray) -> np.ndarray:
    """(C,) bool: where a word, or a character that is a unit, begins."""
    begun = kinds & _UNIT > 0
    begun[1:] &= (kinds[1:] & _SINGLE > 0) | (kinds[:-1] & _UNIT == 0)
    return begun


def _hash_symbol_runs(hashes: np.ndarray, symbols: np.ndarray, bounds: np.ndarray) -> None:
    """Replace the hash of each symbol that ends a run of eight symbols by the hash of the run, in place. This distinguishes texts that
    consist of few symbols, such as mazes.
    """
    if not symbols.any():
        return
    run = np.cumsum(symbols)
    last = np.flatnonzero(run[_RUN - 1 :] - np.concatenate(([0], run[:-_RUN])) == _RUN) + _RUN - 1 if len(run) >= _RUN else run[:0]
    inside = last - _RUN + 1 >= bounds[np.searchsorted(bounds, last, side="right") - 1]
    hashes[last[inside]] = ngrams(hashes, _RUN)[last[inside] - _RUN + 1]


def _hashes(codes: np.ndarray, starts: np.ndarray, values_of: np.ndarray) -> np.ndarray:
    """(U,) the sum over a unit's letters of value times STEP to the power of the letter's position in the unit, mixed.

    Letters are weighted by their position in the text, whose powers need no look-up, and each sum is divided by the power of its unit's
    position.
    """
    if not len(starts):
        return np.zeros(0, dtype=np.uint64)
    forth, back = _powers()
    weighed = np.empty(len(codes), dtype=np.uint64)
    unit_starts = np.searchsorted(starts, np.arange(0, len(codes) + _BLOCK, _BLOCK))
    undo = back[starts & (_BLOCK - 1)]
    forward, backward = np.uint64(1), np.uint64(1)
    for block, first in enumerate(range(0, len(codes), _BLOCK)):
        part = weighed[first : first + _BLOCK]
        np.multiply(values_of[codes[first : first + _BLOCK]], forth[: len(part)], out=part)
        if block:
            part *= forward
            undo[unit_starts[block] : unit_starts[block + 1]] *= backward
        forward, backward = np.multiply(forward, forth[_BLOCK]), np.multiply(backward, back[_BLOCK])
    sums: np.ndarray = np.add.reduceat(weighed, starts)
    sums *= undo
    return mix(sums)


def ngrams_of(hashes: np.ndarray, lengths: Iterable[int]) -> Iterator[tuple[int, np.ndarray]]:
    """For each n of `lengths`, ascending: (n, hashes of all runs of n units, of shape (max(U - n + 1, 0),)).

    Runs that span two documents are included; the caller excludes them. Work is shared: a run is built from two of half its length.
    """
    made = {1: hashes}
    for n in sorted(set(lengths)):
        yield n, mix(_polynomial_sums(made, n).copy())


def _polynomial_sums(made: dict[int, np.ndarray], n: int) -> np.ndarray:
    """Sums over all runs of n units of hash times STEP to the power of the number of units after it, built from the sums in `made`."""
    if n not in made:
        back = n // 2 if n % 2 == 0 else 1
        ahead = _polynomial_sums(made, n - back)
        count = max(len(made[1]) - n + 1, 0)
        sums = ahead[:count] * _powers()[0][back]
        sums += _polynomial_sums(made, back)[n - back :][:count]
        made[n] = sums
    return made[n]


def extend_ngrams(grams: np.ndarray, hashes: np.ndarray, n: int) -> None:
    """Extend runs of n - 1 units, one per run of n, to runs of n units, in place; apply `mix` to get their hashes."""
    grams *= STEP
    grams += hashes[n - 1 :][: len(grams)]


def ngrams(hashes: np.ndarray, n: int) -> np.ndarray:
    """Hashes of all runs of n units: (max(U - n + 1, 0),) uint64."""
    return next(grams for _, grams in ngrams_of(hashes, [n]))


def in_repeated_ngram(grams: np.ndarray, n: int) -> np.ndarray:
    """(U,) bool: which units are inside a run of n that occurred earlier, from the hashes of all runs of n."""
    again = np.ones(len(grams), dtype=bool)
    again[np.unique(grams, return_index=True)[1]] = False
    edges = np.zeros(len(grams) + n, dtype=np.int32)
    edges[:-n][again] += 1
    edges[n:][again] -= 1
    covered: np.ndarray = np.cumsum(edges)[:-1] > 0
    return covered


def run_hash(hashes: np.ndarray) -> np.ndarray:
    """One hash of the run of all units, equal to `ngrams(hashes, len(hashes))`: (1,) uint64."""
    if not 0 < len(hashes) <= _BLOCK:
        return ngrams(hashes, max(len(hashes), 1))
    return mix((hashes * _powers()[0][len(hashes) - 1 :: -1]).sum(keepdims=True))
