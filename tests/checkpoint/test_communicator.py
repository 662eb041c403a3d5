"""The processes that save together."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lmworks.checkpoint.communicator import new_communicator


def waited(told: Path) -> str:
    """The second rank comes only after the first has given up."""
    assert dist.group.WORLD is not None
    dist.barrier()  # the group that is made next has the time-out already, and must not wait for a slow start
    dist.group.WORLD.set_timeout(timedelta(seconds=2))
    communicator = new_communicator()
    dist.group.WORLD.set_timeout(timedelta(minutes=10))
    if communicator.rank:
        while not told.exists():
            time.sleep(0.02)
        return ""
    try:
        communicator.all_gather(None)
        return "waited"
    except RuntimeError as error:
        return str(error)
    finally:
        told.touch()


def test_a_team_waits_no_longer_than_the_ranks(ranks, tmp_path: Path) -> None:
    """A rank that is frozen inside a save would otherwise hold up all others for the half hour of torch."""
    said, _ = ranks.run(waited, 2, tmp_path / "told")
    assert "imed out" in said
