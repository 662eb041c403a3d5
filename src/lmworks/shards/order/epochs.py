"""The order in which one phase reads the sequences of one source, epoch by epoch."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from lmworks.shards.order.permute import derive_key, permute


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
    """

    def __init__(self, seed: int, phase: str, source: str, sequences: int) -> None:
        self._name = (seed, phase, source)
        self._ranges = [EpochRange(0, 0, sequences, 0)]
        self._read_once = sequences  # the number of draws after which every sequence has been read once

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
        begin = max(taken, self._read_once)
        read = last.read + ceil((begin - last.first) / last.count)
        if begin == last.first:
            self._ranges.pop()
        fresh = EpochRange(begin, old, sequences - old, 0)
        self._read_once = begin + fresh.count
        self._ranges += [fresh, EpochRange(self._read_once, 0, sequences, read)]

    def locate(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For draws `k`: the sequence, and its epoch (how many times it, or the oldest in its range, was read before). Both int64."""
        k = np.asarray(k, np.int64)
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
