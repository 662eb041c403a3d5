"""Shuffling without a list: a keyed permutation of [0, size), evaluated one index at a time.

An alternating Feistel network (Luby and Rackoff 1988) permutes the smallest power of two that holds `size`; an image outside
is mapped again until it falls inside ("cycle walking", Black and Rogaway 2002), which keeps it a bijection. The work and the
memory for one index do not depend on how many there are. Only 64-bit integer arithmetic is used, so that every platform and
every version of numpy gives the same order.

The order in which one phase reads the sequences of one source, epoch by epoch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from math import ceil
from typing import Any

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


@dataclass(frozen=True)
class EpochRange:
    """From draw `first` on, sequences [low, low + count) are read repeatedly, in a new keyed order each epoch.

    `read` is how many times the oldest of them was read before.
    """

    first: int
    low: int
    count: int
    read: int


class EpochOrder:
    """Maps the k-th draw of a phase from a source to a sequence: all `sequences` once, then again in another order, and so on.

    If the range is extended after `taken` draws, the sequences that were never read come first: the rest of the old range, then the new
    one. After that, epochs cover the whole range. Draws before `taken` do not change.

    `phase` is the one whose order this is, and `begin` how many of its draws came before: a later phase may go on with what an earlier one
    has left.
    """

    def __init__(self, seed: int, phase: str, source: str, sequences: int) -> None:
        self.phase, self.begin = phase, 0
        self._name = (seed, phase, source)
        self._ranges = [EpochRange(0, 0, sequences, 0)]
        self._read_once = sequences  # the number of draws after which every sequence has been read once

    @classmethod
    def of_state(cls, seed: int, source: str, state: Mapping[str, Any]) -> EpochOrder:
        """The order with the `state` of another one."""
        order = cls(seed, state["phase"], source, 0)
        order.begin, order._read_once = state["begin"], state["read_once"]
        order._ranges = [EpochRange(*one) for one in state["ranges"]]
        return order

    @property
    def state(self) -> dict[str, Any]:
        """What `of_state` makes this order from, as plain JSON values."""
        ranges = [list(astuple(one)) for one in self._ranges]
        return {"phase": self.phase, "begin": self.begin, "read_once": self._read_once, "ranges": ranges}

    @property
    def sequences(self) -> int:
        """The number of sequences in the range."""
        last = self._ranges[-1]
        return last.low + last.count

    def extend(self, taken: int, sequences: int) -> None:
        """Extend the range to `sequences` sequences, after `taken` draws."""
        old, last = self.sequences, self._ranges[-1]
        assert sequences > old, "a range only grows"
        if not old:
            self._ranges, self._read_once = [EpochRange(0, 0, sequences, 0)], sequences
            return
        begin = max(taken + self.begin, self._read_once)
        read = last.read + ceil((begin - last.first) / last.count)
        if begin == last.first:
            self._ranges.pop()
        fresh = EpochRange(begin, old, sequences - old, 0)
        self._read_once = begin + fresh.count
        self._ranges += [fresh, EpochRange(self._read_once, 0, sequences, read)]

    def locate(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For draws `k`: the sequence, and its epoch (how many times it, or the oldest in its range, was read before). Both int64."""
        k = np.asarray(k, np.int64) + self.begin
        sequence, epoch = np.empty_like(k), np.empty_like(k)
        which = np.searchsorted([passage.first for passage in self._ranges], k, side="right") - 1
        for number in np.unique(which):
            passage = self._ranges[number]
            mine = np.flatnonzero(which == number)
            lap, position = np.divmod(k[mine] - passage.first, passage.count)
            for now in np.unique(lap):
                chosen = mine[lap == now]
                part = (int(now), int(number)) if number else (int(now),)
                key = derive_key(*self._name, *part)
                sequence[chosen] = passage.low + permute(position[lap == now], passage.count, key)
            epoch[mine] = passage.read + lap
        return sequence, epoch
