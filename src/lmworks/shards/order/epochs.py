"""How one phase reads one source: which sequence its k-th turn is."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from lmworks.shards.order.permute import derive_key, permute


@dataclass(frozen=True)
class EpochRange:
    """From turn `first` on, sequences [low, low + count) are read again and again, in a new keyed order each time.

    `read` is how often the oldest of them was read before.
    """

    first: int
    low: int
    count: int
    read: int


class EpochOrder:
    """The turns of a source in a phase: all of its `sequences` once, then once more in another order, and so on.

    A range that is extended on the way, after `taken` turns, is read so: what was never read comes first, the rest of the old
    range and then the new; after that everything goes round together. Turns before `taken` are as they were.
    """

    def __init__(self, seed: int, phase: str, source: str, sequences: int) -> None:
        self._name = (seed, phase, source)
        self._passages = [EpochRange(0, 0, sequences, 0)]
        self._read_once = sequences  # the turn by which everything has been read

    @property
    def sequences(self) -> int:
        """Sequences there are to read."""
        last = self._passages[-1]
        return last.low + last.count

    def extend(self, taken: int, sequences: int) -> None:
        """After `taken` turns there are `sequences` of them, more than before."""
        old, last = self.sequences, self._passages[-1]
        assert sequences > old, "a range only grows"
        if not old:
            self._passages, self._read_once = [EpochRange(0, 0, sequences, 0)], sequences
            return
        begin = max(taken, self._read_once)
        read = last.read + ceil((begin - last.first) / last.count)
        if begin == last.first:
            self._passages.pop()
        fresh = EpochRange(begin, old, sequences - old, 0)
        self._read_once = begin + fresh.count
        self._passages += [fresh, EpochRange(self._read_once, 0, sequences, read)]

    def locate(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For turns `k`: the sequence, and how often it (or the oldest beside it) was read before. Both int64."""
        k = np.asarray(k, np.int64)
        sequence, epoch = np.empty_like(k), np.empty_like(k)
        which = np.searchsorted([passage.first for passage in self._passages], k, side="right") - 1
        for number in np.unique(which):
            passage = self._passages[number]
            mine = np.flatnonzero(which == number)
            lap, position = np.divmod(k[mine] - passage.first, passage.count)
            for now in np.unique(lap):
                chosen = mine[lap == now]
                part = (int(now), int(number)) if number else (int(now),)
                key = derive_key(*self._name, *part)
                sequence[chosen] = passage.low + permute(position[lap == now], passage.count, key)
            epoch[mine] = passage.read + lap
        return sequence, epoch
