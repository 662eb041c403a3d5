"""Shuffling without a list: a keyed permutation of [0, size), evaluated one index at a time.

An alternating Feistel network (Luby and Rackoff 1988) permutes the smallest power of two that holds `size`; an image outside
is mapped again until it falls inside ("cycle walking", Black and Rogaway 2002), which keeps it a bijection. The work and the
memory for one index do not depend on how many there are. Only 64-bit integer arithmetic is used, so that every platform and
every version of numpy gives the same order.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

ROUNDS = 8
_LEAST_BITS = 6  # with fewer bits, some permutations of 5 or 6 elements are measurably more frequent than others


def derive_key(*parts: int | str) -> np.ndarray:
    """The round keys, (8,) uint64, for a purpose named by `parts`, such as (seed, phase, source, epoch)."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Where the permutation of [0, size) under `key` sends each `index`; same shape, int64.

    Raises ValueError if an index lies outside [0, size).
    """
    index = np.asarray(index, np.int64)
    if index.size and (index.min() < 0 or index.max() >= size):
        raise ValueError(f"an index lies outside [0, {size})")
    bits = max(_LEAST_BITS, (size - 1).bit_length())
    image = _feistel(index.reshape(-1).astype(np.uint64), bits, key)
    outside = np.flatnonzero(image >= size)
    while outside.size:
        image[outside] = _feistel(image[outside], bits, key)
        outside = outside[image[outside] >= size]
    return image.astype(np.int64).reshape(index.shape)


def _feistel(value: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    """A bijection on [0, 2**bits). The halves differ by one bit when `bits` is odd, hence alternation instead of a swap."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = value & low_mask, value >> low_bits
    for number in range(0, ROUNDS, 2):
        high = high ^ (_mix(low + key[number]) & high_mask)
        low = low ^ (_mix(high + key[number + 1]) & low_mask)
    return (high << low_bits) | low


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): each input bit changes each output bit with probability near 1/2."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
