from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmworks.shards.epochs import derive_key, permute


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_every_index_comes_exactly_once(size: int, seed: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, derive_key(seed))), np.arange(size))


@given(size=st.integers(1, 2**62), seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=60, deadline=None)
def test_huge_ranges_stay_inside_and_collide_never(size: int, seed: int, data: st.DataObject) -> None:
    index = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=50))), np.int64)
    image = permute(index, size, derive_key(seed))
    assert image.min() >= 0
    assert image.max() < size
    assert len(np.unique(image)) == len(index)


def test_one_at_a_time_and_all_at_once_agree() -> None:
    key = derive_key(3, "phase", "source", 0)
    together = permute(np.arange(777), 777, key)
    assert together.tolist() == [int(permute(np.array([i]), 777, key)[0]) for i in range(777)]


def test_the_order_is_pinned_on_every_platform() -> None:
    """A change of these numbers changes the data of every run that resumes."""
    assert permute(np.arange(12), 12, derive_key(1, "general", "web", 0)).tolist() == [7, 0, 4, 5, 8, 1, 11, 6, 10, 9, 3, 2]
    far = permute(np.array([0, 1, 10**12]), 10**15, derive_key(1, "general", "web", 1))
    assert far.tolist() == [672239080741980, 887396063992201, 570082548902512]


def test_keys_tell_apart_what_only_looks_alike() -> None:
    alike = ((1, "ab", "c", 0), (1, "a", "bc", 0), (1, "ab", "c", 1), (11, "b", "c", 0), ("1", "ab", "c", 0))
    keys = [derive_key(*parts).tobytes() for parts in alike]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("size", [3, 4])
def test_small_ranges_take_every_order_equally_often(size: int) -> None:
    trials = 40 * math.factorial(size)
    seen = Counter(tuple(permute(np.arange(size), size, derive_key(trial, size))) for trial in range(trials))
    free = math.factorial(size) - 1
    chi_square = sum((count - 40) ** 2 / 40 for count in seen.values()) + (free + 1 - len(seen)) * 40
    assert chi_square < free + 3 * math.sqrt(2 * free), "more than three sigma away from uniform"


def test_large_ranges_look_random() -> None:
    """Each within five sigma of what a random order gives: fixed points, neighbors, correlation, and spread of every stretch."""
    size = 100_003
    image = permute(np.arange(size), size, derive_key(5))
    assert np.count_nonzero(image == np.arange(size)) <= 8
    assert np.count_nonzero(np.diff(image) == 1) <= 8
    assert abs(np.corrcoef(np.arange(size), image)[0, 1]) < 5 / math.sqrt(size)
    ascents = np.count_nonzero(np.diff(image) > 0)
    assert abs(ascents - size / 2) < 5 * math.sqrt(size / 12)
    cells = np.histogram2d(np.arange(size), image, bins=20)[0]
    expected = size / 400
    chi_square = ((cells - expected) ** 2 / expected).sum()
    assert abs(chi_square - 361) < 5 * math.sqrt(2 * 361)


def test_epochs_are_independent() -> None:
    size = 50_000
    first, second = (permute(np.arange(size), size, derive_key(1, "p", "s", epoch)) for epoch in (0, 1))
    assert np.count_nonzero(first == second) <= 8
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(size)


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(ValueError, match=r"outside \[0, 5\)"):
        permute(np.array([5]), 5, derive_key(1))
