"""A failed save is tried again sooner and sooner, and not for ever."""

from __future__ import annotations

import pytest

from lmworks.errors import UserError
from lmworks.watch.saves import FailedSaves


def test_tries_come_sooner_and_end():
    saves, tries = FailedSaves(4, 100), []
    step = 100
    for _ in range(3):
        saves.failed(step, UserError("the disk is full"))
        assert saves.again
        assert not saves.due(saves.again - 1)
        assert saves.due(saves.again)
        tries.append(saves.again - step)
        step = saves.again
    assert tries == [50, 25, 12]
    with pytest.raises(UserError, match=r"the disk is full \(it failed 4 times in a row: stability.max_failed_saves\)"):
        saves.failed(step, UserError("the disk is full"))


def test_a_good_save_forgets_the_failed_ones():
    saves = FailedSaves(2, 1)
    for step in range(0, 20, 2):
        saves.failed(step, UserError("no"))
        assert saves.due(step + 1)
        saves.succeeded()
        assert not saves.due(step + 99)
