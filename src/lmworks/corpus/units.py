"""Text to word hashes, many documents at a time in numpy: the one tokenisation behind the rules, near-duplicates and contamination.

A unit is a run of letters, digits, marks and underscores, case folded; in scripts written without spaces (Han, kana, Thai, Lao, Khmer,
Burmese) each character is a unit of its own, so an n-gram of units is one of words or of characters, as the text itself asks.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

SPACELESS_LANGUAGES = frozenset({"zh", "ja", "th", "lo", "km", "my"})
_PLANES = 0x33480  # past the last assigned letter; whatever lies above is a separator
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
_WORD, _SINGLE, _LETTER = 1, 2, 4  # bits of a code point's kind; a separator has none
_BLOCK = 1 << 15
_ODD = 0x9E3779B97F4A7C15
STEP = np.uint64(0xD6E8FEB86659FD93)


def mix(x: np.ndarray) -> np.ndarray:
    """Scatter 64-bit values over all bits (the finaliser of SplitMix64, Steele 2014). In place; returns its argument."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@lru_cache(maxsize=1)
def _tables() -> tuple[np.ndarray, np.ndarray, bytes]:
    """Per code point its kind and the hash of the folded letter (0 for separators); and the kinds of ASCII for `bytes.translate`."""
    kinds = np.zeros(_PLANES, dtype=np.uint8)
    folded = np.arange(_PLANES, dtype=np.uint64)
    for code in range(_PLANES):
        char = chr(code)
        category = unicodedata.category(char)
        if category[0] in "LNM" or char == "_":
            kinds[code] = _WORD | (_LETTER if category[0] == "L" else 0)
            lower = char.lower()
            if len(lower) == 1:
                folded[code] = ord(lower)
    for start, stop in _SPACELESS:
        span = kinds[start:stop]
        span[:] = np.where(span & _WORD, span ^ (_WORD | _SINGLE), 0)
    values = mix((folded + np.uint64(1)) * np.uint64(_ODD))
    values[kinds == 0] = 0
    return kinds, values, kinds[:256].tobytes()


@lru_cache(maxsize=1)
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """Powers 0 to 2^15 of the step and of its inverse modulo 2^64."""
    steps = np.full((2, _BLOCK + 1), STEP, dtype=np.uint64)
    steps[1] = pow(int(STEP), -1, 1 << 64)
    steps[:, 0] = 1
    forth, back = np.multiply.accumulate(steps, axis=1)
    return forth, back


@dataclass(frozen=True)
class Units:
    """The units of several documents. Document d owns units `bounds[d]:bounds[d+1]`; starts and ends are code points in its own text."""

    hashes: np.ndarray  # (U,) uint64
    starts: np.ndarray  # (U,) int64
    ends: np.ndarray  # (U,) int64
    letters: np.ndarray  # (U,) how many letters a unit has
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


def units(texts: Sequence[str]) -> Units:
    """Split texts into hashed units, vectorised over all of them."""
    kinds_of, values_of, ascii_kinds = _tables()
    joined = "\n".join(texts)
    if joined.isascii():
        raw = joined.encode("ascii")
        codes, kinds = np.frombuffer(raw, dtype=np.uint8), np.frombuffer(raw.translate(ascii_kinds), dtype=np.uint8)
    else:
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        codes = np.minimum(codes, np.uint32(_PLANES - 1))
        kinds = kinds_of[codes]
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    firsts = np.cumsum(lengths + 1) - (lengths + 1)
    word, single = (kinds & _WORD).view(bool), kinds & _SINGLE > 0
    opening, closing = word.copy(), word.copy()
    opening[1:] &= ~word[:-1]
    closing[:-1] &= ~word[1:]
    opening |= single
    closing |= single
    starts, ends = np.flatnonzero(opening), np.flatnonzero(closing) + 1
    bounds = np.append(np.searchsorted(starts, firsts), len(starts))
    offset = np.repeat(firsts, np.diff(bounds))
    others = np.flatnonzero((kinds > 0) & (kinds < _LETTER))  # digits, marks, underscores
    letters = ends - starts - np.bincount(np.searchsorted(starts, others, side="right") - 1, minlength=len(starts))
    return Units(_hashes(codes, starts, values_of), starts - offset, ends - offset, letters, single[starts], bounds)


def _hashes(codes: np.ndarray, starts: np.ndarray, values_of: np.ndarray) -> np.ndarray:
    """(U,) the sum over a unit's letters of value times step to the power of the letter's place in the unit, mixed.

    All letters are weighed by their place in the text, whose powers need no looking up, and each sum is taken back by its unit's place.
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

    Runs over a document's end are the caller's to leave out. The lengths share their work: n + 1 is one step on from n.
    """
    wanted = sorted(set(lengths))
    grams = hashes.copy()
    for n in range(1, wanted[-1] + 1 if wanted else 0):
        if n > 1:
            lengthen(grams := grams[: max(len(hashes) - n + 1, 0)], hashes, n)
        if n in wanted:
            yield n, mix(grams.copy())


def lengthen(grams: np.ndarray, hashes: np.ndarray, n: int) -> None:
    """Turn runs of n - 1 units, of which there are as many as runs of n, into those, in place; `mix` makes their hashes."""
    grams *= STEP
    grams += hashes[n - 1 :][: len(grams)]


def ngrams(hashes: np.ndarray, n: int) -> np.ndarray:
    """Hashes of all runs of n units: (max(U - n + 1, 0),) uint64."""
    return next(grams for _, grams in ngrams_of(hashes, [n]))


def repeated(grams: np.ndarray, n: int) -> np.ndarray:
    """(U,) bool: which units lie in a run of n that stood earlier, from the hashes of all runs of n."""
    again = np.ones(len(grams), dtype=bool)
    again[np.unique(grams, return_index=True)[1]] = False
    edges = np.zeros(len(grams) + n, dtype=np.int32)
    edges[:-n][again] += 1
    edges[n:][again] -= 1
    covered: np.ndarray = np.cumsum(edges)[:-1] > 0
    return covered


def whole(hashes: np.ndarray) -> np.ndarray:
    """One hash for the run of all units, equal to `ngrams(hashes, len(hashes))`: (1,) uint64."""
    if not 0 < len(hashes) <= _BLOCK:
        return ngrams(hashes, max(len(hashes), 1))
    return mix((hashes * _powers()[0][len(hashes) - 1 :: -1]).sum(keepdims=True))
