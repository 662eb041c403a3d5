"""Perplexity of texts under a small model of the held-out text. Text that is unlike the rest of the corpus has an unusual value.

The model predicts bytes, so it has no unknown words and is independent of the language: n-grams up to length 5, interpolated by method C of
Witten and Bell (1991). Contexts longer than two bytes are hashed; collisions change the estimates little, because the text is small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

MAX_CONTEXT = 4  # bytes of context
MAX_TRAINING_BYTES = 8_000_000
SCORED_BYTES = 4096  # bytes of a text that are scored
_BITS = (0, 8, 16, 20, 21)  # size of the context table of each length, in bits
MIN_PROBABILITY = 1 / 65536  # added to each probability, so that none is 0
_ODD = np.uint64(0x9E3779B97F4A7C15)


class ReferenceModel:
    """An n-gram model of `texts`, trained on at most `MAX_TRAINING_BYTES` bytes. Memory: 40 MB."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.documents = self.bytes = 0
        some: list[bytes] = []
        for text in texts:
            if self.bytes >= MAX_TRAINING_BYTES:
                break
            data = text.encode()[: MAX_TRAINING_BYTES - self.bytes]
            some.append(data)
            self.documents += 1
            self.bytes += len(data)
        codes, valid = _concatenated(some)
        self._totals, self._kinds, self._counts = [], [], []
        for length, (contexts, grams) in enumerate(_table_indices(codes)):
            size = 1 << _BITS[length]
            self._totals.append(np.bincount(contexts[valid], minlength=size).astype(np.float32))
            counts = np.bincount(grams[valid], minlength=_table_size(length)).astype(np.float32)
            # the first occurrence of each n-gram adds one to the distinct bytes that follow its context; hash collisions hide some
            first = np.unique(grams[valid], return_index=True)[1]
            kinds = np.bincount(contexts[valid][first], minlength=size).astype(np.float32)
            self._kinds.append(np.maximum(kinds, self._totals[-1] > 0))
            self._counts.append(counts)

    def perplexity(self, texts: Sequence[str]) -> np.ndarray:
        """(N,) perplexity per byte over the first `SCORED_BYTES` bytes of each text: two to the power of the bits per byte. 256 is uniform;
        NaN for an empty text.
        """
        some = [text[:SCORED_BYTES].encode()[:SCORED_BYTES] for text in texts]
        codes, valid = _concatenated(some)
        chance = np.full(len(codes), 1 / 256, dtype=np.float32)
        for length, (contexts, grams) in enumerate(_table_indices(codes)):
            total, kinds = self._totals[length][contexts], self._kinds[length][contexts]
            seen = np.minimum(self._counts[length][grams], total)
            np.divide(seen + kinds * chance, total + kinds, out=chance, where=total > 0)
        bits = np.where(valid, -np.log2(chance + MIN_PROBABILITY), 0.0)
        sizes = np.array([len(data) for data in some], dtype=np.int64)
        begins = np.cumsum(sizes + MAX_CONTEXT) - (sizes + MAX_CONTEXT)
        sums = np.add.reduceat(bits, begins, dtype=np.float64) if len(some) else np.zeros(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            found: np.ndarray = np.exp2(sums / sizes)
        return found


def _concatenated(some: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """(C,) the texts as one array of bytes, with null bytes before each text so that no context spans two texts; and which bytes are
    text.
    """
    nulls = b"\0" * MAX_CONTEXT
    codes = np.frombuffer(b"".join(nulls + data for data in some), dtype=np.uint8).astype(np.uint64)
    ends = np.cumsum([len(data) + MAX_CONTEXT for data in some], dtype=np.int64)
    valid = np.ones(len(codes), dtype=bool)
    for place in range(MAX_CONTEXT):
        valid[np.concatenate(([0], ends[:-1]))[: len(some)] + place] = False
    return codes, valid


def _table_size(length: int) -> int:
    return 1 << min(_BITS[length] + 8, 22)


def _table_indices(codes: np.ndarray) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """For each context length: (C,) the table index of each byte's context, and of the context followed by the byte."""
    packed = np.zeros_like(codes)
    for length in range(MAX_CONTEXT + 1):
        if length:
            packed[length:] |= codes[:-length] << np.uint64(8 * (length - 1)) if len(codes) > length else 0
        grams = packed << np.uint64(8) | codes
        yield _to_index(packed, 1 << _BITS[length], length <= 2), _to_index(grams, _table_size(length), length <= 1)


def _to_index(values: np.ndarray, size: int, exact: bool) -> np.ndarray:
    """Values as indices of a table of `size`, a power of two: unchanged if `exact`, otherwise hashed."""
    places = values if exact else (values * _ODD) >> np.uint64(64 - (size.bit_length() - 1))
    return places.astype(np.int64)
