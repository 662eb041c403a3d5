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
_SEPARATOR, _WORD, _SINGLE = 0, 1, 2
_LONGEST = 1 << 12
_ODD = 0x9E3779B97F4A7C15
_STEP = np.uint64(0xD6E8FEB86659FD93)


def mix(x: np.ndarray) -> np.ndarray:
    """Scatter 64-bit values over all bits (the finaliser of SplitMix64, Steele 2014). In place; returns its argument."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@lru_cache(maxsize=1)
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Per code point: kind, hash of the folded letter (0 for separators), is it a letter.

    And the powers that place a letter in its word.
    """
    kinds = np.zeros(_PLANES, dtype=np.uint8)
    folded = np.arange(_PLANES, dtype=np.uint64)
    letters = np.zeros(_PLANES, dtype=bool)
    for code in range(_PLANES):
        char = chr(code)
        category = unicodedata.category(char)
        if category[0] in "LNM" or char == "_":
            kinds[code] = _WORD
            letters[code] = category[0] == "L"
            lower = char.lower()
            if len(lower) == 1:
                folded[code] = ord(lower)
    for start, stop in _SPACELESS:
        span = slice(start, stop)
        kinds[span] = np.where(kinds[span] == _WORD, _SINGLE, _SEPARATOR)
    values = mix((folded + np.uint64(1)) * np.uint64(_ODD))
    values[kinds == _SEPARATOR] = 0
    powers = np.full(_LONGEST, _STEP, dtype=np.uint64)
    powers[0] = 1
    return kinds, values, letters, np.multiply.accumulate(powers)


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


def units(texts: Sequence[str]) -> Units:
    """Split texts into hashed units, vectorised over all of them (about 25 MB/s on one core)."""
    kinds_of, values_of, letters_of, powers = _tables()
    joined = "\n".join(texts)
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    bounded = np.minimum(codes, np.uint32(_PLANES - 1)) if len(codes) and codes.max() >= _PLANES else codes
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    firsts = np.cumsum(lengths + 1) - (lengths + 1)
    kinds = kinds_of[bounded]
    word, single = kinds == _WORD, kinds == _SINGLE
    opening, closing = word.copy(), word.copy()
    opening[1:] &= ~word[:-1]
    closing[:-1] &= ~word[1:]
    opening |= single
    starts, ends = np.flatnonzero(opening), np.flatnonzero(closing | single) + 1
    bounds = np.append(np.searchsorted(starts, firsts), len(starts))
    if not len(starts):
        empty = np.zeros(0, dtype=np.int64)
        return Units(empty.astype(np.uint64), empty, empty, empty, empty.astype(bool), bounds)
    place = np.arange(len(codes), dtype=np.int32)
    place -= np.maximum.accumulate(np.where(opening, place, np.int32(0)))
    np.minimum(place, _LONGEST - 1, out=place)
    hashes = mix(np.add.reduceat(values_of[bounded] * powers[place], starts))
    letters = np.add.reduceat(letters_of[bounded], starts, dtype=np.int32)
    offset = np.repeat(firsts, np.diff(bounds))
    return Units(hashes, starts - offset, ends - offset, letters, single[starts], bounds)


def ngrams_of(hashes: np.ndarray, lengths: Iterable[int]) -> Iterator[tuple[int, np.ndarray]]:
    """For each n of `lengths`, ascending: (n, hashes of all runs of n units, of shape (max(U - n + 1, 0),)).

    Runs over a document's end are the caller's to leave out. The lengths share their work: n + 1 is one step on from n.
    """
    wanted = sorted(set(lengths))
    grams = hashes.copy()
    for n in range(1, wanted[-1] + 1 if wanted else 0):
        if n > 1:
            grams = grams[: max(len(hashes) - n + 1, 0)]
            grams *= _STEP
            grams += hashes[n - 1 :][: len(grams)]
        if n in wanted:
            yield n, mix(grams.copy())


def ngrams(hashes: np.ndarray, n: int) -> np.ndarray:
    """Hashes of all runs of n units: (max(U - n + 1, 0),) uint64."""
    return next(grams for _, grams in ngrams_of(hashes, [n]))


def whole(hashes: np.ndarray) -> np.ndarray:
    """One hash for the run of all units, equal to `ngrams(hashes, len(hashes))`: (1,) uint64."""
    return ngrams(hashes, max(len(hashes), 1))
