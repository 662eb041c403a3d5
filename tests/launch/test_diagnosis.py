"""Heartbeats, and who is named by what they have left behind."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder.components import types as analyzer

from lmworks.io import files
from lmworks.watch.flight_recorder import Entered, entered_collectives, read_record, set_defaults, write_record
from lmworks.watch.heartbeat import (
    Beat,
    Heartbeat,
    classify_error,
    diagnose_failure,
    read_beats,
    read_local_beats,
    recover_beats,
    shared_interval,
)
from patience import PATIENCE
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


def test_of_silent_ranks_those_that_were_asked_to_end_are_not_blamed_for_another() -> None:
    both = [beat(0, "running"), beat(1, "running", doing="data")]
    found = diagnose_failure(both, {(0, 1000)})
    assert found and found.ranks == (1,) and "rank 1 on node-0 (process 1001) ended without an error message" in found.reason
    stuck = [beat(0, "running"), beat(1, "running"), beat(2, "cut", 7, LOST)]
    assert (found := diagnose_failure(stuck, {(0, 1000)})) and found.ranks == (1,)
    assert (found := diagnose_failure(stuck, {(0, 999)})) and found.ranks == (0, 1), "another process of this rank"
    assert (found := diagnose_failure(both, {(0, 1000), (1, 1001)})) and "all ended at once" in found.reason
    frozen = [beat(0, "cut", 7, LATE), beat(1, "running")]
    assert (found := diagnose_failure(frozen, {(1, 1001)})) and found.ranks == (1,), "it was asked because of itself"


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


def test_the_last_beat_is_what_is_read_and_a_shorter_one_covers_a_longer(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 3)
    heart.beat(123456, "a long word for what is being done here")
    heart.share()
    heart.beat(7, "data")
    assert [one.step for one in read_beats(tmp_path)] == [123456], "the main thread writes nothing into the shared folder"
    heart.share()
    for beats in (read_beats(tmp_path), read_local_beats(tmp_path)):
        assert [(one.rank, one.step, one.doing, one.state) for one in beats] == [(3, 7, "data", "running")]
    heart.record_witness({"loss": Entered(4, "all_reduce", 1.0)})
    assert read_beats(tmp_path)[0].entered["loss"].number == 4
    heart.end("failed", "x" * 3000)
    heart.beat(8, "not written any more")
    assert not heart.share()
    (last,) = read_beats(tmp_path)
    assert (last.state, last.reason, last.step) == ("failed", "x" * 3000, 7)
    assert read_local_beats(tmp_path) == [], "what is shared leaves nothing on the machine"
    (tmp_path / "4.json").write_text("{")  # a file that is just being made
    assert len(read_beats(tmp_path)) == 1


def test_a_process_can_be_alive_while_its_main_thread_says_nothing(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 0)
    heart.share()
    before = read_beats(tmp_path)[0]
    time.sleep(0.02)
    heart.touch()
    heart.share()
    after = read_beats(tmp_path)[0]
    assert after.seen > before.seen and after.time == before.time
    heart.end("left")


def test_a_shared_folder_that_hangs_delays_no_step(tmp_path: Path) -> None:
    """A pipe in place of the file blocks whoever opens it, as a file server that does not answer does."""
    os.mkfifo(tmp_path / "0.json")
    heart = Heartbeat(tmp_path, 0)
    sharing = threading.Thread(target=heart.share, daemon=True)
    sharing.start()
    stepping = threading.Thread(target=lambda: [(heart.beat(step, "data"), heart.touch()) for step in range(100)], daemon=True)
    stepping.start()
    stepping.join(PATIENCE)
    assert not stepping.is_alive() and sharing.is_alive()
    assert [one.step for one in read_local_beats(tmp_path)] == [99]
    reader = os.open(tmp_path / "0.json", os.O_RDONLY | os.O_NONBLOCK)  # the server answers again
    sharing.join(PATIENCE)
    os.close(reader)
    heart.end("left")


def test_ranks_share_at_a_rate_that_does_not_grow_with_their_number() -> None:
    assert shared_interval(1) == shared_interval(8) == 0.5
    assert {ranks / shared_interval(ranks) for ranks in (256, 1024, 8192, 100_000)} == {500}


def _killed_after(folder: Path, steps: int, ranks: Sequence[int] = (2,)) -> None:
    for heart in [Heartbeat(folder, rank) for rank in ranks]:
        heart.share()
        for step in range(steps):
            heart.beat(step, "forward")
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_last_beat_of_a_killed_rank_is_recovered_by_its_machine(tmp_path: Path) -> None:
    alive = Heartbeat(tmp_path, 1)
    alive.share()
    alive.beat(3, "forward")
    killed = multiprocessing.get_context("spawn").Process(target=_killed_after, args=(tmp_path, 8))
    killed.start()
    killed.join()
    assert {one.rank: one.step for one in read_beats(tmp_path)} == {1: 0, 2: 0}
    recover_beats(tmp_path, tmp_path / "records")
    assert {one.rank: (one.step, one.state) for one in read_beats(tmp_path)} == {1: (0, "running"), 2: (7, "running")}
    assert [one.rank for one in read_local_beats(tmp_path)] == [1], "a process that lives speaks for itself"
    alive.end("left")


def test_what_an_older_start_has_left_on_a_machine_does_not_cover_the_beat_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_private_bases", lambda: (tmp_path,))
    old = Heartbeat(tmp_path, 0)
    old.beat(9, "forward")
    shared = json.dumps({name: value for name, value in asdict(beat(0, "running", step=4)).items() if name != "seen"})
    (tmp_path / "0.json").write_text(shared)
    (local,) = files.private_folder().iterdir()
    os.utime(local, (0, 0))  # before this process began: it was another one that had its number
    recover_beats(tmp_path, tmp_path / "records")
    assert (tmp_path / "0.json").read_text() == shared and not local.exists()
    old.end("left")


@pytest.mark.parametrize("taken", ["link", "open to others", "file"])
def test_a_name_that_somebody_else_may_have_taken_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    """As another user could in /dev/shm before the first run. Then only shared heartbeats are left."""
    monkeypatch.setattr(files, "_private_bases", lambda: (tmp_path,))
    target, name = tmp_path / "target", tmp_path / f"lmworks-{os.geteuid()}"
    target.mkdir(mode=0o700)
    if taken == "link":
        name.symlink_to(target)
    elif taken == "file":
        name.touch()
    else:
        name.mkdir()
        name.chmod(0o777)
    heart = Heartbeat(tmp_path / "beats", 0)
    heart.beat(5, "data")
    assert heart.share() and read_beats(tmp_path / "beats")[0].step == 5
    assert read_local_beats(tmp_path / "beats") == [] and not list(target.iterdir())
    heart.end("left")


def test_the_folder_of_a_user_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_private_bases", lambda: (tmp_path / "missing", tmp_path))
    assert files.private_folder().parent == tmp_path
    assert stat.S_IMODE(files.private_folder().stat().st_mode) == 0o700


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


def _write_record(folder: Path) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    write_record(folder, dist.get_rank())


def test_torchs_analyzer_reads_what_ranks_write(ranks: RankPool, tmp_path: Path) -> None:
    """That of torch 2.11 refuses gloo: it gets the same records as NCCL's, which differ by the name."""
    ranks.run(partial(_write_record, tmp_path), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0", "rank_1"]
    if '["nccl", "xccl"]' in inspect.getsource(analyzer.Op):
        for path in tmp_path.iterdir():
            tree = pickle.loads(path.read_bytes())
            for entry in tree["entries"]:
                entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
            path.write_bytes(pickle.dumps(tree, protocol=2))
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", tmp_path, "--allow-incomplete-ranks"]
    for options in ([], ["-j"]):
        done = subprocess.run([*command, *options], capture_output=True, encoding="utf-8")
        assert done.returncode == 0, done.stderr
    assert "all_reduce(input_sizes=[[2]]" in done.stdout + done.stderr
    assert read_record(tmp_path, 0, 0.0)["default_pg [0, 1]"].name == "all_reduce"
    assert read_record(tmp_path, 0, time.time() + 60) == {}, "of an earlier failure"


def _record_of(*numbers: int) -> bytes:
    """What NCCL's watchdog writes, as far as it is read."""
    return pickle.dumps({"version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}, "entries": [
        {"process_group": ("0", "default_pg"), "collective_seq_id": number, "profiling_name": "nccl:all_reduce", "time_created_ns": number}
        for number in numbers
    ]}, protocol=2)  # fmt: skip


def test_ranks_that_the_watchdog_of_nccl_has_ended_name_the_one_that_was_missing(tmp_path: Path) -> None:
    """It ends all processes at once, with a file of each and no last word."""
    process = multiprocessing.get_context("spawn").Process(target=_killed_after, args=(tmp_path, 1, (0, 1, 2)))
    process.start()
    process.join()
    for rank, numbers in enumerate([(6, 7), (6,), (6, 7)]):
        (tmp_path / f"rank_{rank}").write_bytes(_record_of(*numbers))
    recover_beats(tmp_path, tmp_path)
    found = diagnose_failure(read_beats(tmp_path))
    assert found and found.ranks == (1,)
    assert "missing from all_reduce number 7 of group default_pg [0, 1, 2], where ranks 0, 2" in found.reason


class _Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("stolen",)


def test_a_record_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (pickle.dumps(_Hostile()), b"", b"junk", pickle.dumps([1]), pickle.dumps({"entries": [1]})):
        (tmp_path / "rank_0").write_bytes(content)
        assert read_record(tmp_path, 0, 0.0) == {}
    assert not (tmp_path / "stolen").exists()


def test_what_the_user_has_set_for_nccl_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    for name in names:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    set_defaults(tmp_path)
    assert [os.environ.get(name) for name in names] == ["1", f"{tmp_path}/rank_", None]
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/theirs/rank_")
    set_defaults(tmp_path)
    assert [os.environ.get(name) for name in names] == ["0", None, "/theirs/rank_"]
