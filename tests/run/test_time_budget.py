"""The measurement behind `time`, as one process and as ranks that take part in it together."""

from __future__ import annotations

import pytest

from lmworks.parallel.mesh import Ranks
from lmworks.run import time_budget
from lmworks.train.calibrate import Speed
from tiny_run import Tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def measured(tiny: Tiny, ranks: int) -> Speed:
    recipe = tiny.resolve("time=20 s", f"layout.dp_shard={ranks}", "train.micro_batch_sequences=1").recipe
    return time_budget.measure_speed(recipe, tiny.run_dir, Ranks(recipe.layout))


def test_ranks_measure_together_and_know_the_same(ranks, tiny: Tiny) -> None:
    (alone,), shared = ranks.run(measured, 1, tiny, 1, seconds=600), ranks.run(measured, 2, tiny, 2, seconds=600)
    for speed in (alone, *shared):
        assert list(speed.train) == list(speed.tokens) == [32, 64]
        assert all(value > 0 for value in (*speed.train.values(), speed.forward, speed.decode))
        assert speed.steps >= 2
    assert shared[0].steps == shared[1].steps
    assert shared[0].train == shared[1].train, "the slowest rank's time is every rank's"
