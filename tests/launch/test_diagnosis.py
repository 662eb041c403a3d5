"""Heartbeats, and who is named by what they have left behind."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lmworks.watch.diagnosis import classify_error, diagnose_failure, find_stalled
from lmworks.watch.heartbeat import Beat, Entered, Heartbeat, entered_collectives, read_beats
from rank_pool import RankPool

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"
LATE = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"


def beat(rank: int, state: str, number: int = 0, reason: str = "", group: str = "loss", name: str = "all_reduce", **others: object) -> Beat:
    entered = {group: Entered(number, name, 100.0 + number)} if number else {}
    known = {"step": 12, "doing": "update", "time": 140.0, "seen": 150.0} | others
    return Beat(rank, f"node-{rank // 2}", "machine", 1000 + rank, state=state, reason=reason, entered=entered, **known)  # type: ignore[arg-type]


def test_a_rank_that_was_killed_is_named() -> None:
    found = diagnose_failure([beat(0, "cut", 7, LOST), beat(1, "cut", 7, LOST), beat(2, "running", doing="data"), beat(3, "told", 7)])
    assert found and found.ranks == (2,) and found.hosts == ("node-1",) and found.step == 12
    assert "rank 2 on node-1 (process 1002) ended without an error message" in found.reason
    assert "last heartbeat was at step 12 (data)" in found.reason
    assert "missing from all_reduce number 7 of group loss, where ranks 0, 1 waited" in found.reason


def test_a_rank_that_hangs_is_named_with_what_it_did_and_the_collective() -> None:
    beats = [beat(0, "cut", 7, LATE), beat(1, "told", 6, doing="data", time=90.0), beat(2, "cut", 7, LATE), beat(3, "told", 7)]
    found = diagnose_failure(beats)
    assert found and found.ranks == (1,)
    assert "rank 1 on node-0 (process 1001) was alive but did not enter the collective" in found.reason
    assert "it had been at step 12 (data) for 60 s" in found.reason
    assert "missing from all_reduce number 7 of group loss" in found.reason


def test_a_rank_that_froze_is_told_from_one_that_was_killed() -> None:
    found = diagnose_failure([beat(0, "cut", 7, LATE), beat(1, "running")])
    assert found and "stopped responding" in found.reason


def test_a_rank_that_waited_elsewhere_for_the_missing_one_is_not_blamed() -> None:
    """Rank 2 hangs; rank 1 waits for it in fsdp and is therefore missing from loss, where rank 0 gives up first."""
    zero = beat(0, "cut", 7, LATE)
    one = replace(beat(1, "told", 6), entered={"loss": Entered(6, "all_reduce", 106.0), "fsdp": Entered(9, "all_gather", 119.0)})
    two = replace(beat(2, "told", doing="data"), entered={"loss": Entered(6, "all_reduce", 106.0), "fsdp": Entered(8, "all_gather", 107.0)})
    found = diagnose_failure([zero, one, two])
    assert found and found.ranks == (2,)


def test_a_rank_that_came_after_the_others_had_given_up_was_missing() -> None:
    found = diagnose_failure(
        [beat(0, "cut", 7, LATE, seen=110.0), replace(beat(1, "cut", 7, LOST), entered={"loss": Entered(7, "all_reduce", 111.0)})]
    )
    assert found and found.ranks == (1,)


def test_an_exception_of_its_own_goes_before_what_it_did_to_the_others() -> None:
    found = diagnose_failure([beat(0, "cut", 7, LOST), beat(1, "failed", reason="ValueError: bad block"), beat(2, "told", 7)])
    assert found and found.ranks == (1,) and found.reason == "rank 1 on node-0 (process 1001) failed at step 12: ValueError: bad block"


def test_ranks_that_left_as_they_should_break_nothing() -> None:
    assert diagnose_failure([beat(0, "left"), beat(1, "left")]) is None
    assert diagnose_failure([]) is None


def test_a_world_that_vanished_whole_blames_no_rank_alone() -> None:
    found = diagnose_failure([beat(0, "running"), beat(1, "running")])
    assert found and found.ranks == (0, 1) and "all ended at once" in found.reason


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (RuntimeError(LOST), "cut"),
        (dist.DistBackendError("NCCL error"), "cut"),
        (ValueError("bad block"), "failed"),
        (MemoryError(), "failed"),
    ],
)
def test_a_failed_collective_is_told_from_a_failure_of_its_own(error: BaseException, state: str) -> None:
    assert classify_error(error) == state


def test_ranks_that_are_behind_in_a_running_world_are_named() -> None:
    beats = [beat(0, "running", step=8, time=95.0), beat(1, "running", step=7, time=40.0), beat(2, "running", step=8, time=95.0)]
    assert [one.rank for one in find_stalled(beats, 30.0, now=100.0)] == [1]
    assert find_stalled(beats, 70.0, now=100.0) == []


def test_the_last_beat_is_what_is_read_and_a_shorter_one_covers_a_longer(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 3)
    heart.beat(123456, "a long word for what is being done here")
    heart.beat(7, "data")
    assert [(one.rank, one.step, one.doing, one.state) for one in read_beats(tmp_path)] == [(3, 7, "data", "running")]
    heart.record_witness({"loss": Entered(4, "all_reduce", 1.0)})
    assert read_beats(tmp_path)[0].entered["loss"].number == 4
    heart.end("failed", "x" * 3000)
    heart.beat(8, "not written any more")
    (last,) = read_beats(tmp_path)
    assert (last.state, last.reason, last.step) == ("failed", "x" * 3000, 7)
    (tmp_path / "4.json").write_text("{")  # a file that is just being made
    assert len(read_beats(tmp_path)) == 1


def test_a_process_can_be_alive_while_its_main_thread_says_nothing(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 0)
    before = read_beats(tmp_path)[0]
    time.sleep(0.02)
    heart.touch()
    after = read_beats(tmp_path)[0]
    assert after.seen > before.seen and after.time == before.time


def test_without_a_directory_a_heartbeat_is_nothing() -> None:
    heart = Heartbeat(None)
    heart.beat(1, "data")
    heart.touch()
    heart.end("left")


def _record() -> list[tuple[int, str]]:
    before = set(entered_collectives().items())  # by groups of earlier tests in these processes
    dist.all_reduce(torch.ones(2))
    dist.all_gather_into_tensor(torch.ones(2 * dist.get_world_size()), torch.ones(2))
    return [(one.number, one.name) for key, one in entered_collectives().items() if (key, one) not in before]


def test_what_a_rank_has_entered_comes_from_the_recorder(ranks: RankPool) -> None:
    first, second = ranks.run(_record, 2)
    assert first == second == [(2, "all_gather")]


def test_the_recorder_of_nccl_is_read_beside_that_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of torch's recorders; where both know a group, the later collective counts."""

    def record(*entries: tuple[str, int, str, int]) -> bytes:
        about = {name: {"name": name, "desc": "", "ranks": "[0, 1]"} for name, *_ in entries}
        return json.dumps({"pg_config": about, "entries": [
            {"process_group": [name, "undefined"], "collective_seq_id": number, "profiling_name": what, "time_created_ns": at * 10**9}
            for name, number, what, at in entries
        ]}).encode()  # fmt: skip

    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: record(("0", 3, "gloo:all_reduce", 5), ("9", 1, "gloo:broadcast", 9)))
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda: record(("0", 7, "nccl:_all_gather_base", 6), ("9", 8, "nccl:x", 8)), False)
    assert entered_collectives() == {"0 [0, 1]": Entered(7, "_all_gather_base", 6.0), "9 [0, 1]": Entered(1, "broadcast", 9.0)}
