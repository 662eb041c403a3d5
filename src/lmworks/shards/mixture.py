"""The mixture: the source of the g-th sequence, in proportions that are exact at every prefix, not only on average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import floor

import numpy as np

from lmworks.errors import UserError

PERIOD = 10_000


class Mixture:
    """Sources in fixed proportions, interleaved so that every prefix is exact to one sequence.

    The weights become whole 10,000ths (largest remainder). A table of 10,000 slots gives the source of each sequence, and repeats.
    It is built as in Tijdeman's solution of the chairman assignment problem (1980): among the sources that are due, the one with the
    earliest deadline is next. After any number g of sequences, source i has been taken w_i * g times, give or take less than 1.

    `names` are sorted, so that the order of keys in a recipe changes nothing.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.names = tuple(sorted(weights))
        self.slots = np.array(_largest_remainder(tuple(weights[name] for name in self.names)), np.int64)
        for name, slots in zip(self.names, self.slots, strict=True):
            if slots == 0:
                raise UserError(
                    f"mixture: the weight {weights[name]:g} of {name} rounds to 0 of {PERIOD:,}; "
                    f"raise it to 0.0001 or more, or leave {name} out"
                )
        self._turn, self._before = _table(tuple(self.slots.tolist()))

    def locate(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For sequence numbers `g`: the index of its source in `names`, and how many of that source came before. Both int64."""
        cycle, slot = np.divmod(np.asarray(g, np.int64), PERIOD)
        source = self._turn[slot].astype(np.int64)
        return source, cycle * self.slots[source] + self._before[slot]

    def counts(self, prefix: int) -> np.ndarray:
        """How many of the first `prefix` sequences fall to each source, (len(names),) int64."""
        cycle, slot = divmod(prefix, PERIOD)
        return cycle * self.slots + np.bincount(self._turn[:slot], minlength=len(self.names))


class MixturePlan:
    """The mixtures of a phase, one after another; each source's count continues across a change, so that sequences before it do not change.

    `segments` are (number of the first sequence, mixture), ascending from 0.
    """

    def __init__(self, segments: Sequence[tuple[int, Mixture]]) -> None:
        self.segments = tuple(segments)
        self._firsts = np.array([first for first, _ in segments], np.int64)
        assert self._firsts[0] == 0 and (np.diff(self._firsts) > 0).all(), "segments begin at 0 and rise"
        self.names = tuple(sorted({name for _, mixture in segments for name in mixture.names}))
        place = {name: index for index, name in enumerate(self.names)}
        self._index = [np.array([place[name] for name in mixture.names]) for _, mixture in segments]
        self._before = np.zeros((len(segments), len(self.names)), np.int64)
        for number in range(1, len(segments)):
            (first, mixture), stop = segments[number - 1], segments[number][0]
            self._before[number] = self._before[number - 1]
            self._before[number, self._index[number - 1]] += mixture.counts(stop - first)

    def locate(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For sequence numbers `g`: the index of its source in `names`, and how many of that source came before. Both int64."""
        g = np.asarray(g, np.int64)
        source, before = np.empty_like(g), np.empty_like(g)
        which = np.searchsorted(self._firsts, g, side="right") - 1
        for number in np.unique(which):
            first, mixture = self.segments[number]
            mine = which == number
            turn, taken = mixture.locate(g[mine] - first)
            source[mine] = self._index[number][turn]
            before[mine] = taken + self._before[number, source[mine]]
        return source, before

    def counts(self, prefix: int) -> np.ndarray:
        """How many of the first `prefix` sequences fall to each source, (len(names),) int64."""
        number = int(np.searchsorted(self._firsts, prefix, side="right")) - 1
        first, mixture = self.segments[number]
        counts = self._before[number].copy()
        counts[self._index[number]] += mixture.counts(prefix - first)
        return counts

    def changed(self, first: int, mixture: Mixture) -> MixturePlan:
        """The plan with `mixture` from sequence `first` on, up to the next change that was planned."""
        others = [segment for segment in self.segments if segment[0] != first]
        return MixturePlan(sorted([*others, (first, mixture)], key=lambda segment: segment[0]))


def _largest_remainder(weights: tuple[float, ...]) -> list[int]:
    """Whole numbers in the proportions of `weights` that sum to the period. Fractions, because 0.29 * 10,000 is not 2,900 in floats."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    if not exact or min(exact) <= 0:
        raise UserError("mixture: it needs at least one source, and positive weights")
    shares = [weight / total * PERIOD for weight in exact]
    slots = [floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (slots[i] - shares[i], i))
    for i in by_remainder[: PERIOD - sum(slots)]:
        slots[i] += 1
    return slots


@lru_cache(maxsize=64)
def _table(slots: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each slot, and how many slots that source had before it.

    All numbers are multiplied by PERIOD * (2k - 2) to stay whole. At slot t, source i lacks `due` = w_i * t - taken_i. It may be
    taken once due >= 1 / (2k - 2), and must be before due would reach 1; the one that would get there first is taken.
    """
    rate = np.array(slots, np.int64)
    if len(rate) == 1:
        return np.zeros(PERIOD, np.int32), np.arange(PERIOD, dtype=np.int64)
    scale = 2 * len(rate) - 2
    one, grace = PERIOD * scale, PERIOD
    due = np.zeros(len(rate), np.int64)
    taken = np.zeros(len(rate), np.int64)
    turn, before = np.empty(PERIOD, np.int32), np.empty(PERIOD, np.int64)
    for t in range(PERIOD):
        due += rate * scale
        candidates = np.flatnonzero(due >= grace)
        slack = (one - grace - due[candidates]) / rate[candidates]
        chosen = candidates[np.argmin(slack)]
        turn[t], before[t] = chosen, taken[chosen]
        due[chosen] -= one
        taken[chosen] += 1
    assert np.array_equal(taken, rate), "the table must hold each source exactly in its proportion"
    return turn, before
