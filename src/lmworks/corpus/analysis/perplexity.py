"""How surprising a text is to a small model of the held-out text: what does not read like the rest of the corpus stands out.

The model is one of bytes, so that it knows no unknown words and no language: n-grams up to 5, interpolated by method C of Witten
and Bell (1991). Contexts longer than two bytes are hashed; two that fall together blur the model a little, as its text is small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

LONGEST = 4  # bytes of context
MOST_TEXT = 8_000_000
HEAD = 4096  # bytes of a text that are looked at
_BITS = (0, 8, 16, 20, 21)  # of the table of contexts of each length
NEVER = 1 / 65536  # of a byte that the model thinks impossible
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Reference:
    """A model of `texts`, of which at most `MOST_TEXT` bytes are read. Memory: 40 MB."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.documents = self.bytes = 0
        some: list[bytes] = []
        for text in texts:
            if self.bytes >= MOST_TEXT:
                break
            data = text.encode()[: MOST_TEXT - self.bytes]
            some.append(data)
            self.documents += 1
            self.bytes += len(data)
        codes, valid = _laid_out(some)
        self._totals, self._kinds, self._counts = [], [], []
        for length, (contexts, grams) in enumerate(_slots(codes)):
            size = 1 << _BITS[length]
            self._totals.append(np.bincount(contexts[valid], minlength=size).astype(np.float32))
            counts = np.bincount(grams[valid], minlength=_grams(length)).astype(np.float32)
            # each gram's first occurrence tells its context of one more byte that can follow; grams that fall together hide some
            first = np.unique(grams[valid], return_index=True)[1]
            kinds = np.bincount(contexts[valid][first], minlength=size).astype(np.float32)
            self._kinds.append(np.maximum(kinds, self._totals[-1] > 0))
            self._counts.append(counts)

    def perplexity(self, texts: Sequence[str]) -> np.ndarray:
        """(N,) per byte: two to the bits that a byte of the text's first `HEAD` bytes takes. 256 is chance; NaN for an empty text."""
        some = [text[:HEAD].encode()[:HEAD] for text in texts]
        codes, valid = _laid_out(some)
        chance = np.full(len(codes), 1 / 256, dtype=np.float32)
        for length, (contexts, grams) in enumerate(_slots(codes)):
            total, kinds = self._totals[length][contexts], self._kinds[length][contexts]
            seen = np.minimum(self._counts[length][grams], total)
            np.divide(seen + kinds * chance, total + kinds, out=chance, where=total > 0)
        bits = np.where(valid, -np.log2(chance + NEVER), 0.0)
        sizes = np.array([len(data) for data in some], dtype=np.int64)
        begins = np.cumsum(sizes + LONGEST) - (sizes + LONGEST)
        sums = np.add.reduceat(bits, begins, dtype=np.float64) if len(some) else np.zeros(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            found: np.ndarray = np.exp2(sums / sizes)
        return found


def _laid_out(some: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """(C,) bytes, and which of them are text: before each text stand nulls, so that no context reaches into the one before."""
    nulls = b"\0" * LONGEST
    codes = np.frombuffer(b"".join(nulls + data for data in some), dtype=np.uint8).astype(np.uint64)
    ends = np.cumsum([len(data) + LONGEST for data in some], dtype=np.int64)
    valid = np.ones(len(codes), dtype=bool)
    for place in range(LONGEST):
        valid[np.concatenate(([0], ends[:-1]))[: len(some)] + place] = False
    return codes, valid


def _grams(length: int) -> int:
    return 1 << min(_BITS[length] + 8, 22)


def _slots(codes: np.ndarray) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """For each length of context: (C,) the place of each byte's context, and of the context with the byte."""
    packed = np.zeros_like(codes)
    for length in range(LONGEST + 1):
        if length:
            packed[length:] |= codes[:-length] << np.uint64(8 * (length - 1)) if len(codes) > length else 0
        grams = packed << np.uint64(8) | codes
        yield _placed(packed, 1 << _BITS[length], length <= 2), _placed(grams, _grams(length), length <= 1)


def _placed(values: np.ndarray, size: int, exact: bool) -> np.ndarray:
    """Values as places in a table of `size`, a power of two: themselves where they fit, hashed where not."""
    places = values if exact else (values * _ODD) >> np.uint64(64 - (size.bit_length() - 1))
    return places.astype(np.int64)
