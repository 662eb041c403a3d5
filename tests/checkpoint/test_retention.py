"""The rules for keeping, as a pure function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmworks.checkpoint import Checkpoints, listing, manifest
from lmworks.checkpoint.listing import Saved, keep
from lmworks.checkpoint.publish import prune
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


ALL, LAST = Options(keep_last=9), Options(keep_last=1, keep_best=False)


def save(directory: Path, *steps: int) -> None:
    with Checkpoints(directory, ALL, {}) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"model": {"weight": torch.full((4,), float(step))}}, {}, wait=True)


@pytest.fixture
def busy(tmp_path, monkeypatch):
    """Makes checkpoints of a run that saves another one and prunes the others as the newest of them is read by a function of manifests."""

    def make(name: str) -> Path:
        save(tmp_path, 1, 2, 3)
        honest = getattr(manifest, name)

        def late(path, *arguments, **options):
            if path.name == "step-00000003" and path.exists():
                monkeypatch.undo()
                save(tmp_path, 4)
                prune(tmp_path, LAST, 4)
            return honest(path, *arguments, **options)

        monkeypatch.setattr(manifest, name, late)
        return tmp_path

    return make


def test_a_checkpoint_that_is_pruned_while_it_is_verified_is_not_damaged(busy):
    folder = busy("problem")
    assert [(row["step"], row["good"]) for row in listing.verify(folder)] == [(1, True), (2, True)]
    assert [(row["step"], row["good"]) for row in listing.verify(folder)] == [(4, True)]


def test_a_checkpoint_that_is_pruned_while_it_is_listed_has_no_problem(busy):
    assert [(row["step"], row["problem"]) for row in listing.list_checkpoints(busy("entries"))] == [(1, None), (2, None)]


def test_the_newest_good_checkpoint_is_looked_for_again_when_the_run_prunes(busy):
    path, refused = listing.newest_good(busy("problem"))
    assert path is not None and (path.name, refused) == ("step-00000004", [])


def test_a_run_that_prunes_all_the_time_is_not_listed_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "directories", lambda directory: [tmp_path / "step-00000001"])
    assert listing.newest_good(tmp_path) == (None, [])


def test_a_damaged_checkpoint_is_still_refused(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    path, refused = listing.newest_good(tmp_path)
    assert path == tmp_path / "step-00000001" and [one.name for one, _ in refused] == ["step-00000002"]
    assert [row["good"] for row in listing.verify(tmp_path)] == [True, False]
    assert [bool(row["problem"]) for row in listing.list_checkpoints(tmp_path)] == [False, True]
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    listed, honest = [], listing.directories
    monkeypatch.setattr(listing, "directories", lambda directory: listed.append(directory) or honest(directory))
    path, refused = listing.newest_good(tmp_path)
    assert path is None and len(refused) == 2 and len(listed) == 1
