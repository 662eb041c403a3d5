"""Text to word hashes, vectorized over many documents in numpy: the one tokenization for rules, near-duplicates and contamination.

A unit is a word, or a grapheme cluster in scripts written without spaces, as `lmworks.text.letters` defines them. So an n-gram of units
consists of words or of characters, depending on the script. Hashes are those of the folded form: case, accents, vowel points, invisible
characters, and forms of the same letter or digit make no difference.

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

from lmworks.text import letters

_WORD, _SINGLE, _LETTER, _SYMBOL, _MARK, _ATTACHED, _FOLDS, _COMPOSES = 1, 2, 4, 8, 16, 32, 64, 128  # kinds of characters
_UNIT = _WORD | _SINGLE | _ATTACHED
_IGNORED = frozenset(",;'\"`´‘’‚‛“”„‟‹›«»¿¡、。…")  # typographic punctuation, which differs between copies of the same text
_MARKS = frozenset(".:?!-‐‑‒–—―·•")
_WORDS_PER_SYMBOL = 3
Symbols = Literal["", "lines", "all"]
_NEWLINE = 10
_STRETCH = 64
_RUN = 8
_BLOCK = 1 << 15
_ODD = 0x9E3779B97F4A7C15
STEP = np.uint64(0xD6E8FEB86659FD93)
_TAGS = 0xE0000  # first of the code points above all letters that are invisible


def mix(x: np.ndarray) -> np.ndarray:
    """Mix the bits of 64-bit values (the finalizer of SplitMix64, Steele 2014). In place; returns its argument."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@dataclass(frozen=True)
class _Tables:
    """Per code point: its kind (none for a separator), the hash of its folded form without symbols and with them, and the folded form if
    that is not one character: `counts` characters of `folded` from `firsts` on. `ascii_kinds` is for `bytes.translate`.
    """

    kinds: np.ndarray
    values: np.ndarray
    symbol_values: np.ndarray
    counts: np.ndarray
    firsts: np.ndarray
    folded: np.ndarray
    ascii_kinds: bytes


@lru_cache(maxsize=1)
def _tables() -> _Tables:
    kinds = np.zeros(letters.PLANES, dtype=np.uint8)
    counts, firsts = np.ones(letters.PLANES, dtype=np.uint8), np.zeros(letters.PLANES, dtype=np.int64)
    forms = np.arange(letters.PLANES, dtype=np.uint64)
    folded: list[int] = []
    for pattern, kind in (
        (letters.LETTER, _WORD | _LETTER), (letters.DIGIT, _WORD), ("_", _WORD), (letters.SYMBOL + "--_", _SYMBOL),
        (letters.SPACELESS, _SINGLE | _LETTER), (letters.ATTACHED, _ATTACHED | _LETTER),
    ):  # fmt: skip
        kinds[list(map(ord, letters.characters(f"[{pattern}]")))] = kind
    for chars, kind in ((_IGNORED, 0), (_MARKS, _MARK), (map(chr, range(0x3000, 0x3005)), 0), (map(chr, range(0x3008, 0x3021)), 0)):
        kinds[list(map(ord, chars))] = kind
    for char in letters.characters(letters.FOLDED):
        code, form = ord(char), letters.fold_character(char)
        if form == char or (not kinds[code] and unicodedata.category(char)[0] not in "CM"):
            continue
        if len(form) == 1:
            forms[code], kinds[code] = ord(form), kinds[ord(form)]
        else:
            counts[code], firsts[code], kinds[code] = len(form), len(folded), _FOLDS
            folded += map(ord, form)
    kinds[list(map(ord, letters.characters(letters.COMPOSING)))] |= _COMPOSES
    values = mix((forms + np.uint64(1)) * np.uint64(_ODD))
    has_value = np.where(kinds & _UNIT > 0, values, 0), np.where(kinds > 0, values, 0)
    return _Tables(kinds, *has_value, counts, firsts, np.array(folded, dtype=np.uint32), kinds[:256].tobytes())


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
    tables = _tables()
    read = _classify(texts)
    codes, kinds = read.codes, read.kinds
    word, single = (kinds & _WORD).view(bool), kinds & _SINGLE > 0
    values_of = tables.values
    if symbols:
        left = kinds & (_SYMBOL | _MARK) > 0
        if symbols == "lines":
            codes = np.where(left & ~_in_symbolic_lines(codes, kinds), np.uint32(_NEWLINE), codes)
            left &= codes != _NEWLINE
        single, values_of = single | left, tables.symbol_values
    opening, closing = word.copy(), word.copy()
    opening[1:] &= ~word[:-1]
    closing[:-1] &= ~word[1:]
    opening |= single
    closing |= single
    inside = word | single
    if read.attached:
        marks = kinds & _ATTACHED > 0
        base = marks | (kinds & _SINGLE > 0)
        opening[1:] |= marks[1:] & ~base[:-1]
        opening[:1] |= marks[:1]
        closing[:-1] &= ~(base[:-1] & marks[1:])
        closing[:-1] |= marks[:-1] & ~marks[1:]
        closing[-1:] |= marks[-1:]
        inside |= marks
    starts, ends = np.flatnonzero(opening), np.flatnonzero(closing) + 1
    bounds = np.append(np.searchsorted(starts, read.firsts), len(starts))
    others = np.flatnonzero((kinds & _LETTER == 0) & inside)  # digits, underscores, symbols
    lettered = ends - starts - np.bincount(np.searchsorted(starts, others, side="right") - 1, minlength=len(starts))
    hashes = _hashes(codes, starts, values_of)
    if symbols == "lines":
        _hash_symbol_runs(hashes, kinds[starts] & (_SYMBOL | _MARK) > 0, bounds)
    own = single[starts] if not read.attached else single[starts] | (kinds[starts] & _ATTACHED > 0)
    starts, ends = read.places(starts), read.places(ends - 1) + 1
    offset = np.repeat(read.offsets, np.diff(bounds))
    return Units(hashes, starts - offset, ends - offset, lettered, own, bounds)


@dataclass(frozen=True)
class _Read:
    """Texts joined with line ends, with the characters that do not fold to one character replaced by their folded form."""

    codes: np.ndarray  # (C,) code points
    kinds: np.ndarray  # (C,) their kinds
    firsts: np.ndarray  # (D,) where each text begins in `codes`
    offsets: np.ndarray  # (D,) where each text begins in the joined texts
    origins: np.ndarray | None = None  # (C,) the place in the joined texts of each code point, if it differs
    attached: bool = False  # whether there are marks of scripts without spaces

    def places(self, index: np.ndarray) -> np.ndarray:
        """Places in the joined texts, from places in `codes`."""
        return index if self.origins is None else self.origins[index]


def _classify(texts: Sequence[str]) -> _Read:
    tables = _tables()
    joined = "\n".join(texts)
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    offsets = np.cumsum(lengths + 1) - (lengths + 1)
    if joined.isascii():
        raw = joined.encode("ascii")
        codes, kinds = np.frombuffer(raw, dtype=np.uint8), np.frombuffer(raw.translate(tables.ascii_kinds), dtype=np.uint8)
        return _Read(codes, kinds, offsets, offsets)
    codes, kinds, origins = _classified(joined)
    if kinds.max() >= _COMPOSES:
        codes, kinds, origins = _composed(joined)
    if kinds.max() >= _FOLDS and len(places := np.flatnonzero(kinds & _FOLDS)):
        codes, kinds, sources = _folded(codes, places, kinds)
        origins = sources if origins is None else origins[sources]
    firsts = offsets if origins is None else np.searchsorted(origins, offsets)
    return _Read(codes, kinds, firsts, offsets, origins, bool(len(kinds) and kinds.max() >= _ATTACHED))


def _folded(codes: np.ndarray, places: np.ndarray, kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The code points with those at `places` replaced by their folded forms, their kinds, and where in `codes` each comes from."""
    tables = _tables()
    old = codes[places]
    counts = tables.counts[old].astype(np.int64)
    ends = places + np.cumsum(counts - 1) + 1  # in the result, of each folded form
    total = len(codes) + int((counts - 1).sum())
    sources = np.arange(total)
    sources -= np.repeat(np.concatenate(([0], np.cumsum(counts - 1))), np.diff(np.concatenate(([0], ends, [total]))))
    which = np.repeat(np.arange(len(places)), counts)
    within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = ends[which] - counts[which] + within
    sources[at] = places[which]
    codes, kinds = codes[sources], kinds[sources]
    codes[at] = tables.folded[tables.firsts[old[which]] + within]
    kinds[at] = tables.kinds[codes[at]]
    return codes, kinds, sources


def _classified(text: str) -> tuple[np.ndarray, np.ndarray, None]:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    if codes.max() >= letters.PLANES:
        codes = np.where(codes >= _TAGS, np.uint32(0xAD), np.minimum(codes, np.uint32(letters.PLANES - 1)))
    return codes, _tables().kinds[codes], None


def _composed(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Like `_classified`, with sequences composed that fold to one character only as a whole, and the places of all characters."""
    pieces, places, at = [], [], 0
    for found in letters.COMPOSED.finditer(text):
        form = unicodedata.normalize("NFKC", found[0])
        pieces += [text[at : found.start()], form]
        places += [np.arange(at, found.start()), np.full(len(form), found.start())]
        at = found.end()
    codes, kinds, _ = _classified("".join([*pieces, text[at:]]))
    return codes, kinds, np.concatenate([*places, np.arange(at, len(text))])


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
    read = _classify([*texts, ""])
    return (
        np.add.reduceat(read.kinds == _SYMBOL, read.firsts[:-1], dtype=np.int64),
        np.add.reduceat(_word_starts(read.kinds), read.firsts[:-1], dtype=np.int64),
    )


def symbolic_stretches(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(S,) texts and (S,) positions in them of stretches of 64 characters that have at least 16 symbols, each different from its
    predecessor, and four times as many symbols as words.
    """
    read = _classify([*texts, " " * _STRETCH])
    codes, kinds = read.codes, read.kinds
    changing = kinds & (_SYMBOL | _MARK) > 0
    changing[1:] &= codes[1:] != codes[:-1]
    run_hash = len(kinds) // _STRETCH * _STRETCH
    strong = np.add.reduce(changing[:run_hash].reshape(-1, _STRETCH), axis=1, dtype=np.uint8)
    found = np.flatnonzero(strong >= 16)
    words = np.add.reduce(_word_starts(kinds)[:run_hash].reshape(-1, _STRETCH)[found], axis=1, dtype=np.uint8)
    middles = found[strong[found] >= words * np.uint8(4)] * _STRETCH + _STRETCH // 2
    numbers = np.minimum(np.searchsorted(read.firsts, middles, side="right"), len(texts)) - 1
    return numbers, read.places(middles) - read.offsets[numbers]


def _word_starts(kinds: np.ndarray) -> np.ndarray:
    """(C,) bool: where a word, or a character that is a unit, begins."""
    begun = kinds & (_WORD | _SINGLE) > 0
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
