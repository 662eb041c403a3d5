from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmworks.shards.row_plans import best_fit

pieces = st.lists(st.integers(1, 64), max_size=120)


@given(lengths=pieces)
@settings(max_examples=100, deadline=None)
def test_no_row_overflows_and_no_two_rows_could_be_one(lengths: list[int]) -> None:
    row_of = best_fit(np.array(lengths, np.int64), 64)
    filled = np.bincount(row_of, weights=lengths) if lengths else np.empty(0)
    assert (filled <= 64).all()
    assert (filled > 0).all()
    if len(filled) > 1:
        assert np.sort(filled)[:2].sum() > 64


@given(lengths=pieces)
@settings(max_examples=100, deadline=None)
def test_rows_needed_stay_within_the_known_bound(lengths: list[int]) -> None:
    """Best-fit decreasing needs at most 11/9 of the least possible, and 1 more (Johnson 1973); sum / capacity is below the least."""
    rows = best_fit(np.array(lengths, np.int64), 64).max(initial=-1) + 1
    large = sum(length > 32 for length in lengths)
    least = max(-(-sum(lengths) // 64), large)
    assert rows >= least
    if all(length <= 16 for length in lengths):
        assert rows <= sum(lengths) / (64 - 15) + 1, "all rows but the last are fuller than capacity less the longest piece"


def test_the_fullest_row_with_room_is_taken() -> None:
    assert best_fit(np.array([6, 5, 4, 3, 2]), 10).tolist() == [0, 1, 0, 1, 1]


def test_rows_are_numbered_by_their_first_piece() -> None:
    assert best_fit(np.array([2, 9, 8, 1]), 10).tolist() == [0, 1, 0, 1]
