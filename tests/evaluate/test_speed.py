"""Speeds are of what was generated, and the time is kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lmworks.errors import UserError
from lmworks.evaluate import speed
from lmworks.evaluate.speed import Spread, measure_speed
from lmworks.model import Transformer


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(speed, "time", clock)
    real = speed.stream

    def slow(model: Transformer, prompts: list[list[int]], options: object) -> Iterator[object]:
        clock.now += 0.01 * len(prompts) * len(prompts[0])
        for step in real(model, prompts, options):  # type: ignore[arg-type]
            yield step
            clock.now += 0.5

    monkeypatch.setattr(speed, "stream", slow)
    return clock


def test_speeds_are_tokens_over_time(small_transformer: Transformer, clock: Clock) -> None:
    found = measure_speed(small_transformer, [2], [8, 32], new_tokens=5, seconds=100)
    assert [(row.batch, row.prompt) for row in found.rows] == [(2, 8), (2, 32)]
    for row in found.rows:
        assert row.first_token.median == pytest.approx(0.01 * 2 * row.prompt)
        assert row.prefill == Spread(*[pytest.approx(100)] * 3)
        assert row.decode and row.decode.median == pytest.approx(2 * 4 / 2.0)  # 4 later tokens of 2 rows, half a second each
        assert row.peak_memory is None or row.peak_memory > 1e7
    assert (found.dtype, found.weights, found.new_tokens) == ("float32", "float32", 5)
    assert found.device.startswith("cpu")


def test_the_time_is_kept(small_transformer: Transformer, clock: Clock) -> None:
    found = measure_speed(small_transformer, [1, 100], [8, 64], new_tokens=8, seconds=20)
    assert clock.now - 100 < 20 + 8
    assert [(row.batch, row.prompt) for row in found.rows] == [(1, 8), (1, 64)]
    assert [(one["batch"], one["prompt"]) for one in found.skipped] == [(100, 8), (100, 64)]
    assert "20 s" in found.skipped[0]["reason"]


def test_longer_than_the_context_is_skipped(small_transformer: Transformer, clock: Clock) -> None:
    found = measure_speed(small_transformer, [1], [16, 90], new_tokens=8, seconds=30)
    assert found.skipped == [{"batch": 1, "prompt": 90, "reason": "with its new tokens longer than the context of 96"}]
    with pytest.raises(UserError, match="context of 96"):
        measure_speed(small_transformer, [1], [90], new_tokens=8)


def test_too_little_memory_is_a_row_that_says_so(small_transformer: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = speed.stream

    def full(model: Transformer, prompts: list[list[int]], options: object) -> Iterator[object]:
        if len(prompts) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, prompts, options)  # type: ignore[arg-type]

    monkeypatch.setattr(speed, "stream", full)
    found = measure_speed(small_transformer, [1, 4], [8], new_tokens=2, seconds=2)
    assert found.skipped == [{"batch": 4, "prompt": 8, "reason": "out of memory"}]


@pytest.mark.parametrize("wrong", [{"batches": [0]}, {"prompt_lengths": [-1]}, {"new_tokens": 1}, {"seconds": 0}])
def test_impossible_numbers_are_refused(small_transformer: Transformer, wrong: dict) -> None:
    with pytest.raises(UserError, match="from 1"):
        measure_speed(small_transformer, **wrong)
