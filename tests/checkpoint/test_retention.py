"""The rules for keeping, as a pure function."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmworks.checkpoint.listing import Saved, keep
from lmworks.errors import UserError
from lmworks.recipe.schema.artifacts import Checkpoints as Options
from lmworks.recipe.schema.units import Duration


def row(step: int, metric: float | None = None, permanent: bool = False) -> Saved:
    return Saved(Path(f"step-{step:08d}"), step, step * 1000, metric, permanent)


def test_reasons_are_named():
    rows = [row(10, 2.0), row(20, 1.0), row(30, permanent=True), row(40), row(50)]
    options = Options(keep_last=1, keep_every=Duration.parse("40K tokens"))
    assert keep(rows, options, 50) == {50: "last", 20: "best", 30: "permanent", 40: "every"}


def test_the_best_is_the_first_of_the_lowest_finite_values():
    rows = [row(10, 0.5), row(20, 0.0), row(30, 0.0), row(40, float("nan")), row(50), row(60, 0.3)]
    assert keep(rows, Options(keep_last=1), 60) == {60: "last", 20: "best"}


def test_best_can_be_switched_off():
    assert set(keep([row(1, 0.5), row(2, 0.7), row(3)], Options(keep_last=1, keep_best=False), 3)) == {3}


def test_saves_beside_the_multiples_keep_the_first_of_each_interval():
    rows = [row(step) for step in (90, 130, 180, 230, 370, 399)]
    assert set(keep(rows, Options(keep_last=1, keep_every=Duration.parse("100 steps")), 399)) == {130, 230, 370, 399}


def test_a_percentage_needs_the_whole():
    options = Options(keep_last=1, keep_every=Duration.parse("50%"))
    rows = [row(step) for step in range(1, 11)]
    assert set(keep(rows, options, 10, total_tokens=10_000)) == {5, 10}
    with pytest.raises(UserError, match="keep_every"):
        keep(rows, options, 10)


@given(
    metrics=st.lists(st.one_of(st.none(), st.floats()), min_size=1, max_size=25),
    keep_last=st.integers(1, 4), every=st.integers(1, 9), best=st.booleans(),
)
def test_pruning_as_one_goes_keeps_what_pruning_at_the_end_keeps(metrics, keep_last, every, best):
    """Rules must not depend on what earlier prunings removed; and the newest is always there."""
    options = Options(keep_last=keep_last, keep_every=Duration.parse(f"{every} steps"), keep_best=best)
    rows = [row(step + 1, metric) for step, metric in enumerate(metrics)]
    living: list[Saved] = []
    for one in rows:
        living.append(one)
        kept = keep(living, options, one.step)
        assert one.step in kept
        living = [other for other in living if other.step in kept]
    assert {one.step for one in living} == set(keep(rows, options, rows[-1].step))
