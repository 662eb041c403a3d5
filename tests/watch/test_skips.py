"""What a ledger's rollbacks leave out."""

from __future__ import annotations

import random

import pytest

from lmworks.watch.ledger import Rollback, Skips, rollbacks, undone


def test_windows_that_meet_are_one():
    first, second, third = Rollback(9, 4, (6, 10)), Rollback(13, 4, (9, 14)), Rollback(15, 13, (14, 16))
    skips = Skips([first, second, Rollback(30, 20), Rollback(40, 20, (20, 20)), third])
    assert skips.windows == [(6, 16)]
    assert [skips.next(step) for step in (5, 6, 15, 16)] == [5, 16, 16, 16]
    assert (5 in skips, 6 in skips, 16 in skips) == (False, True, False)


def test_every_step_is_trained_or_left_out():
    """Walking stretch by stretch, as the trainer does, visits exactly the steps that no window holds."""
    draw = random.Random(1)
    for _ in range(200):
        windows = [(start, start + draw.randrange(1, 9)) for start in (draw.randrange(60) for _ in range(draw.randrange(5)))]
        skips = Skips([Rollback(stop, start, (start, stop)) for start, stop in windows])
        step, visited = skips.next(0), []
        while step < 60:
            end = skips.until(step, 60)
            visited += range(step, end)
            step = skips.next(end)
        left_out = {step for start, stop in windows for step in range(start, stop)}
        assert visited == [step for step in range(60) if step not in left_out]
        assert sum(stop - start for start, stop in skips.before(60)) == 60 - len(visited)


def test_the_ledger_tells_them():
    lines = [
        {"event": "start", "stage": "pretrain"},
        {"event": "rollback", "step": 14, "to_step": 8, "skip": [8, 15], "stage": "pretrain", "reason": "spike"},
        {"event": "rollback", "step": 20, "to_step": 16, "skip": None},
        {"event": "rollback", "step": 3, "to_step": 2, "skip": [2, 4], "stage": "tune", "reason": "spike"},
    ]
    assert rollbacks(lines, "pretrain") == [Rollback(14, 8, (8, 15), "spike"), Rollback(20, 16)]
    assert rollbacks(lines, "tune") == [Rollback(3, 2, (2, 4), "spike")]


@pytest.mark.parametrize(
    ("step", "known", "expected"), [(8, 0, False), (9, 0, True), (12, 0, True), (12, 1, False), (4, 0, False), (17, 1, True)]
)
def test_checkpoints_from_before_a_rollback_are_undone_by_it(step, known, expected):
    history = [Rollback(14, 8, (8, 15)), Rollback(20, 16, (16, 21))]
    assert undone(step, known, history) is expected
