"""A failed save is tried again sooner and sooner, and not for ever."""

from __future__ import annotations

import pytest

from lmworks.errors import UserError
from lmworks.watch.monitors import FailedSaves


def test_tries_come_sooner_and_end():
    saves, tries = FailedSaves(4, 100), []
    step = 100
    for _ in range(3):
        saves.failed(step, UserError("the disk is full"))
        assert saves.retry_at
        assert not saves.retry_due(saves.retry_at - 1)
        assert saves.retry_due(saves.retry_at)
        tries.append(saves.retry_at - step)
        step = saves.retry_at
    assert tries == [50, 25, 12]
    with pytest.raises(UserError, match=r"the disk is full \(it failed 4 times in a row: stability.max_failed_saves\)"):
        saves.failed(step, UserError("the disk is full"))


def test_a_good_save_forgets_the_failed_ones():
    saves = FailedSaves(2, 1)
    for step in range(0, 20, 2):
        saves.failed(step, UserError("no"))
        assert saves.retry_due(step + 1)
        saves.succeeded()
        assert not saves.retry_due(step + 99)
