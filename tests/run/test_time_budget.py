"""The measurement behind `time`, as one process and as ranks that take part in it together."""

from __future__ import annotations

import pytest

from lmworks.parallel.mesh import Ranks
from lmworks.plan.stages import StageData
from lmworks.run import time_budget
from lmworks.run.time_estimate import FixedWork, predict_seconds
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


def test_a_batch_is_measured_that_a_ramp_longer_than_the_fewest_steps_does_not_reach(tiny: Tiny) -> None:
    ramp = "train.phases.general.batch_ramp={start_tokens: 128 tokens, over: 1000 steps}"
    found = time_budget.batches_by_length(tiny.resolve("time=20 s", ramp).recipe, tiny.run_dir)
    assert {length: batch.tokens.shape[0] for length, batch in found.items()} == {32: 8, 64: 4}


def test_conversations_that_were_counted_are_not_assumed(tiny: Tiny) -> None:
    recipe = tiny.resolve("time=20 s", "tune.tokens=null", "tune.epochs=2", "tune.data.sums.max_rows=null").recipe
    speed = Speed(train={32: 1e20, 64: 1e20}, forward=1e20, decode=1e20, tokens={}, steps=0)

    def seconds(examples: int) -> float:
        read = StageData("tune", examples, 100, 40 * examples, examples // 10, 256 * (examples // 10), 2.0)
        return predict_seconds(recipe, speed, FixedWork(0, 0, 0, {}, 1.0, read))["tune"]

    assert seconds(100_000) == pytest.approx(10 * seconds(10_000), rel=0.02), "what it takes to encode them"
