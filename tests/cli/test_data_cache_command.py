"""`lmworks data cache`: the cache of a machine has what the next steps after a checkpoint read, before ranks start there."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from command import Lmworks

from lmworks.errors import UserError
from lmworks.io.files import read_json, write_json
from lmworks.recipe.changes import as_tree
from lmworks.run.fill_cache import CacheFiller, Filled, follow
from lmworks.shards.batches import Batches
from tiny_run import STEPS, Tiny


def write_recipe(run: Tiny, cache: Path, size: str = "64MB") -> None:
    options = (f"shards.cache.dir={cache}", f"shards.cache.max_bytes={size}", "shards.cache.prefetch=5 steps")
    write_json(run.run_dir / "resolved.json", as_tree(run.resolve(*options).recipe))


@pytest.fixture
def run(tiny: Tiny, tmp_path: Path) -> Tiny:
    """A run whose shards are at a place that can be taken away, with a cache on the disk of this host."""
    made = tiny.copy(tmp_path / "run")
    write_recipe(made, tmp_path / "disk")
    return made


def without_token_files(run: Tiny) -> Batches:
    """The batches of a rank that starts when the storage of the token files does not answer."""
    for path in (run.run_dir / "shards").rglob("*.bin"):
        path.unlink()
    recipe = CacheFiller(run.run_dir)._recipe
    return Batches(recipe, run.run_dir / "shards")


def checkpoint(run: Tiny, step: int) -> None:
    (run.run_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def test_the_steps_after_the_newest_checkpoint_need_no_storage(run: Tiny, tmp_path: Path, lmworks: Lmworks) -> None:
    checkpoint(run, 8)
    assert "the cache has the data of 5 steps from step 8 on" in lmworks("data", "cache", run.run_dir).out
    whole = CacheFiller(run.run_dir)
    batches = without_token_files(run)
    assert [batches.batch(step).step for step in range(8, 13)] == [*range(8, 13)]
    assert whole.fill(2) == Filled(8, 10)
    write_recipe(run, tmp_path / "empty")
    with pytest.raises(UserError, match="is missing"):
        without_token_files(run).batch(8)


def test_a_spare_follows_the_checkpoints(run: Tiny) -> None:
    status, sleeps = run.run_dir / "launch" / "spares" / "n9.json", itertools.count()

    def sleep(seconds: float) -> None:
        if next(sleeps) == 3:
            checkpoint(run, STEPS - 2)

    steps = follow(run.run_dir, status, sleep)
    assert next(steps) == Filled(0, 5) and read_json(status) == {"steps": [0, 5]}
    assert next(steps) == Filled(STEPS - 2, STEPS) and read_json(status) == {"steps": [STEPS - 2, STEPS]}


def test_a_small_cache_is_half_filled(run: Tiny, tmp_path: Path) -> None:
    """8 sequences of 33 ids of 2 bytes are 528 bytes a step."""
    write_recipe(run, tmp_path / "small", "200KB")
    filler = CacheFiller(run.run_dir)
    filler._room = 1500.0
    checkpoint(run, 8)
    assert filler.fill() == Filled(8, 10)


def test_a_run_without_a_cache_is_told_the_keys(tiny: Tiny) -> None:
    with pytest.raises(UserError, match=r"set one with shards.cache.dir and shards.cache.max_bytes"):
        CacheFiller(tiny.run_dir)
