"""The groups of a layout."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lmworks.errors import UserError
from lmworks.parallel.mesh import Ranks, alone
from lmworks.recipe.schema.layout import Layout
from rank_pool import RankPool

AXES = ("pp", "dp_replicate", "tp", "dp", "cp", "loss", "fsdp", "ep", "efsdp", "weights")


def _members(layout: dict[str, int]) -> dict[str, list[int]]:
    ranks = Ranks(Layout(**layout))
    return {axis: dist.get_process_group_ranks(ranks.mesh(axis).get_group()) for axis in AXES}


def test_groups_of_eight_ranks(ranks: RankPool) -> None:
    """pp 2 x dp_shard 2 x tp 2, and experts over dp_shard: the members by hand."""
    found = ranks.run(_members, 8, {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2})
    assert found[0] == {
        "pp": [0, 4], "dp_replicate": [0], "tp": [0, 1], "dp": [0, 2], "cp": [0], "loss": [0, 2], "fsdp": [0, 2], "ep": [0, 2],
        "efsdp": [0], "weights": [0, 1, 2, 3],
    }  # fmt: skip
    assert found[7]["tp"] == [6, 7]
    assert found[7]["pp"] == [3, 7]
    assert found[5]["dp"] == [5, 7]


def test_experts_fold_out_of_data_and_context(ranks: RankPool) -> None:
    found = ranks.run(_members, 8, {"dp_shard": 4, "cp": 2, "ep": 4})
    assert found[0]["ep"] == [0, 1, 2, 3]
    assert found[0]["efsdp"] == [0, 4]
    assert found[0]["fsdp"] == list(range(8))
    within = ranks.run(_members, 8, {"dp_shard": 2, "cp": 4, "ep": 2})
    assert within[0]["ep"] == [0, 1]
    assert within[0]["efsdp"] == [0, 2, 4, 6]


def test_alone() -> None:
    one = alone()
    assert (one.world, one.size("fsdp"), one.rank("tp"), one.group("dp"), one.is_first) == (1, 1, 0, None, True)


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 4}])
def test_more_ranks_than_were_started_are_refused(layout: dict[str, int]) -> None:
    with pytest.raises(UserError, match="but one was started; use: lmworks launch"):
        Ranks(Layout(**layout))


def test_experts_that_do_not_fold_are_refused() -> None:
    with pytest.raises(UserError, match="ep 3 does not fit cp 2"):
        Ranks(Layout(dp_shard=3, cp=2, ep=3))


def _wait_for_the_first(late: float) -> tuple[object, str, float]:
    ranks = Ranks(Layout(dp_shard=2))
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    if ranks.is_first:
        time.sleep(late)
        ranks.broadcast("found")
        dist.barrier()
        time.sleep(late)  # away from the next collective
        return "found", "", 1.0
    found = ranks.receive_broadcast()
    dist.barrier()
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return found, str(error), time.monotonic() - began
    return found, "", 0.0


def test_the_others_wait_for_what_the_first_sends_and_for_nothing_else(ranks: RankPool) -> None:
    """On one group of all: only the wait for a broadcast of `Ranks` has no limit, and afterwards the limit is as before."""
    _, (found, error, seconds) = ranks.run(_wait_for_the_first, 2, 2.0)
    assert found == "found" and "timed out" in error.lower() and 0.9 < seconds < 1.9


def _of_the_first(late: float) -> list[object]:
    ranks, told = Ranks(Layout(dp_shard=2)), []
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=1))

    def work(found: object) -> object:
        told.append("worked")
        time.sleep(late)
        if isinstance(found, Exception):
            raise found
        return found

    for found in ("found", UserError("refused")):
        try:
            told.append(ranks.first(lambda found=found: work(found)))  # type: ignore[misc]
        except UserError as error:
            told.append(str(error))
    return told


def test_the_first_works_for_all(ranks: RankPool) -> None:
    """For longer than a collective may take, and what it raises is raised on all; alone it works as any function."""
    first, other = ranks.run(_of_the_first, 2, 2.0)
    assert first == ["worked", "found", "worked", "refused"] and other == ["found", "refused"]
    assert alone().first(lambda: 3) == 3
    with pytest.raises(UserError, match="refused"):
        alone().first(lambda: load_nothing())


def load_nothing() -> None:
    raise UserError("refused")
