from __future__ import annotations

import threading

import numpy as np
import pytest

from lmworks.errors import UserError
from lmworks.shards import batches as prefetch
from lmworks.shards.batch import Batch
from lmworks.shards.batches import Batches, Prefetch
from patience import PATIENCE


def test_it_yields_the_same_batches_in_order(batches: Batches) -> None:
    with Prefetch(batches.batch, 3, 9) as ready:
        for step, batch in zip(range(3, 9), ready, strict=True):
            assert batch.step == step
            assert np.array_equal(batch.tokens, batches.batch(step).tokens)


def empty(step: int) -> Batch:
    return Batch(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32), np.array([0, 1], np.int32), 0, step)


def test_waiting_is_measured_and_vanishes_when_the_step_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only reading moves forward, which begins when the first batch is asked for."""
    now, asked, third = [0.0], threading.Event(), threading.Event()

    def clock() -> float:
        read = now[0]
        asked.set()
        return read

    def make(step: int) -> Batch:
        asked.wait(PATIENCE)
        if step < 2:
            now[0] += 0.5
        else:
            third.set()
        return empty(step)

    monkeypatch.setattr(prefetch.time, "perf_counter", clock)
    with Prefetch(make, 0, 4) as ready:
        next(ready)
        assert ready.waited >= 0.5
        third.wait(PATIENCE)  # the second is ready
        next(ready)
        assert ready.waited == 0


def test_an_error_is_raised_where_the_batch_is_asked_for() -> None:
    def broken(step: int) -> Batch:
        if step == 1:
            raise ValueError("no such shard")
        return empty(step)

    ready = Prefetch(broken, 0, 4)
    assert next(ready).step == 0
    with pytest.raises(ValueError, match="no such shard"):
        next(ready)
    with pytest.raises(StopIteration):
        next(ready)


def test_storage_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    answer = threading.Event()

    def hangs(step: int) -> Batch:
        answer.wait(PATIENCE)
        return empty(step)

    ready = Prefetch(hangs, 0, 4, patience=1)
    with pytest.raises(UserError, match=r"no batch arrived for 1 s \(stability.data_timeout\)"):
        next(ready)
    answer.set()
    ready.close()


def test_closing_early_stops_the_thread() -> None:
    before = threading.active_count()
    ready = Prefetch(empty, 0, 10**9)
    next(ready)
    ready.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(ready)
