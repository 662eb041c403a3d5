from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmworks.errors import UserError
from lmworks.shards.mixture import PERIOD, Mixture, MixturePlan

weights = st.lists(st.integers(1, 10**6), min_size=1, max_size=24)


def mixture_of(parts: list[int]) -> Mixture | None:
    """None where a part may round to nothing, which is refused."""
    weights = {f"s{number:02d}": part / sum(parts) for number, part in enumerate(parts)}
    if min(parts) * PERIOD < sum(parts):
        return None
    return Mixture(weights)


@given(parts=weights)
@settings(max_examples=25, deadline=None)
def test_every_prefix_is_exact_to_less_than_one_sequence(parts: list[int]) -> None:
    mixture = mixture_of(parts)
    if mixture is None:
        return
    source, _ = mixture.locate(np.arange(PERIOD))
    taken = np.cumsum(source[:, None] == np.arange(len(mixture.names)), axis=0)
    wanted = np.arange(1, PERIOD + 1)[:, None] * mixture.slots
    assert np.abs(taken * PERIOD - wanted).max() < PERIOD
    assert taken[-1].tolist() == mixture.slots.tolist(), "after a period the proportions are exact, so no error is carried on"


@given(parts=weights)
@settings(max_examples=25, deadline=None)
def test_weights_become_the_nearest_10000ths(parts: list[int]) -> None:
    mixture = mixture_of(parts)
    if mixture is None:
        return
    assert mixture.slots.sum() == PERIOD
    for part, slots in zip(parts, mixture.slots.tolist(), strict=True):
        assert abs(Fraction(part, sum(parts)) * PERIOD - slots) < 1 + Fraction(1, 10**6)


@given(parts=weights, start=st.integers(0, 10**15), data=st.data())
@settings(max_examples=25, deadline=None)
def test_each_source_counts_its_sequences_without_gap_or_repeat(parts: list[int], start: int, data: st.DataObject) -> None:
    mixture = mixture_of(parts)
    if mixture is None:
        return
    stop = start + data.draw(st.integers(1, 3000))
    source, k = mixture.locate(np.arange(start, stop))
    before, after = mixture.counts(start), mixture.counts(stop)
    for index in range(len(mixture.names)):
        assert k[source == index].tolist() == list(range(before[index], after[index]))
    assert after.sum() == stop


def test_each_source_counts_on_across_changes() -> None:
    """Also across a second and a third change, before which a mixture began that is not the first."""
    mixtures = [Mixture({"a": 0.7, "b": 0.3}), Mixture({"a": 0.2, "c": 0.8}), Mixture({"b": 0.5, "c": 0.5}), Mixture({"a": 0.9, "c": 0.1})]
    plan = MixturePlan([*zip((0, 700, 1900, 2400), mixtures, strict=True)])
    source, k = plan.locate(np.arange(3000))
    for index in range(3):
        assert k[source == index].tolist() == list(range((source == index).sum()))
    for prefix in (0, 700, 701, 1900, 1901, 2400, 2401, 3000):
        assert plan.counts(prefix).tolist() == np.bincount(source[:prefix], minlength=3).tolist()


def test_the_turns_are_pinned() -> None:
    """A run that is resumed by a later version reads on where it stopped."""
    turns = {
        (0.7, 0.3): "abaaabaabaabaaabaabaabaa", (0.5, 0.3, 0.2): "abacabacbaabacabacbaabac",
        (0.61, 0.2, 0.1, 0.09): "aabacaabdaaabacaabadaaba",
    }  # fmt: skip
    for shares, expected in turns.items():
        mixture = Mixture(dict(zip("abcd", shares, strict=False)))
        assert "".join(mixture.names[turn] for turn in mixture.locate(np.arange(24))[0]) == expected, shares


def test_decimal_weights_are_not_spoilt_by_floats() -> None:
    assert Mixture({"a": 0.29, "b": 0.57, "c": 0.14}).slots.tolist() == [2900, 5700, 1400]
    assert Mixture({"a": 0.00015, "b": 0.99985}).slots.tolist() == [2, 9998], "1.5 and 9,998.5: the first of equal remainders"


def test_the_order_of_keys_changes_nothing() -> None:
    one, other = Mixture({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}), Mixture({"c": 1 / 3, "a": 1 / 3, "b": 1 / 3})
    assert one.names == other.names
    assert np.array_equal(one.locate(np.arange(100))[0], other.locate(np.arange(100))[0])


def test_a_weight_that_rounds_to_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"weight 1e-05 of rare rounds to 0 of 10,000; raise it to 0.0001 or more"):
        Mixture({"rare": 0.00001, "web": 0.99999})


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": 1.0, "b": 0.0}, {"a": 1.0, "b": -0.5}])
def test_no_sources_and_weights_that_are_not_positive_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(UserError, match="at least one source, and positive weights"):
        Mixture(weights)
