"""Slow ranks and slow data are named once, and noise is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmworks.watch.monitors import SlowRanks, Starvation, advice, slowest_rank, time_matmul


def test_a_slow_rank_is_named_once_and_again_after_it_recovered():
    draw, watch, named = np.random.default_rng(0), SlowRanks(8.0), []
    for number in range(60):
        seconds = 0.1 + 0.003 * draw.standard_normal(8)
        if 10 <= number < 20 or 40 <= number < 50:
            seconds[5] *= 1.6
        named += [(number, rank) for rank in watch.observe(seconds.tolist(), 0.025)]
    assert named == [(12, 5), (42, 5)]


def test_noise_names_nobody():
    draw, watch = np.random.default_rng(1), SlowRanks(8.0)
    for _ in range(2000):
        assert watch.observe((0.1 * np.exp(0.05 * draw.standard_normal(64))).tolist(), 0.02) == []


def test_of_two_ranks_the_own_history_decides():
    """A rank that has always been slower is not named; one that becomes slower is, once; a step that becomes longer names nobody."""
    draw, watch, named = np.random.default_rng(2), SlowRanks(8.0), []
    for number in range(80):
        seconds = np.array([0.1, 0.4]) * (1 + 0.02 * draw.standard_normal(2))
        if 20 <= number < 40:
            seconds[0] *= 3
        if number >= 60:
            seconds *= 2
        named += [(number, rank) for rank in watch.observe(seconds.tolist(), 0.02)]
    assert named == [(22, 0)]


def test_without_a_history_nobody_knows_which_of_two_is_slow():
    watch = SlowRanks(8.0)
    assert [watch.observe([0.1, 9.0], 0.0) for _ in range(9)] == [[]] * 9


def test_noise_of_two_ranks_names_nobody():
    draw, watch = np.random.default_rng(3), SlowRanks(8.0)
    for _ in range(2000):
        assert watch.observe((0.1 * np.exp(0.05 * draw.standard_normal(2))).tolist(), 0.02) == []


def test_little_is_nothing_however_even_the_others_are():
    watch = SlowRanks(8.0)
    assert [watch.observe([0.1, 0.1, 0.1, 0.11], 0.02) for _ in range(9)] == [[]] * 9


@pytest.mark.parametrize(
    ("arithmetic", "own", "rank", "excess"),
    [
        ([1.0, 1.0], [0.1, 0.1], 0, 0.0),
        ([1.0, 1.5], [0.0, 0.0], 1, 0.5),
        ([1.0, 1.0], [0.6, 0.0], 0, 0.3),
        ([1.0, 1.2], [0.8, 0.0], 0, 0.2),  # 0.2 of 2 s for arithmetic against 0.4 of 2 s for data
        ([1.0, 1.0, 3.0, 1.0], [0.0, 0.2, 0.0, 0.0], 2, 1.95),
        ([1.0, 1.0, 1.0, 1.0], [0.2, 0.2, 0.2, 0.6], 3, 0.2),
    ],
)
def test_what_the_slowest_rank_costs_in_shares_of_a_step(arithmetic: list[float], own: list[float], rank: int, excess: float) -> None:
    assert slowest_rank(arithmetic, own, 2.0) == (rank, pytest.approx(excess))


def test_the_probe_measures_something():
    assert 0 < time_matmul(torch.device("cpu")) < 60


def test_starvation_is_told_once():
    watch, told = Starvation(0.2, window=10), []
    for step in range(100):
        waited = 0.5 if 30 <= step < 60 or step >= 80 else 0.01
        if share := watch.observe(waited, 1.0):
            told.append((step, round(share, 2)))
    assert [step for step, _ in told] == [33, 83]
    assert all(share > 0.2 for _, share in told)
    assert watch.steps > 40
    assert "shards.cache" in advice(True)
    assert "disk" in advice(False)
