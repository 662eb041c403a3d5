"""How a rank has ended, as its agent records it: real processes that exit, are killed, and run out of the memory of their group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmworks.host.machine import control_groups
from lmworks.launch import agent
from lmworks.launch.agent import report_exits
from lmworks.launch.launch_dir import VARIABLE, LaunchDir
from lmworks.watch.heartbeat import HOST
from lmworks.watch.ledger import LEDGER, Ledger, events_of

START = "from lmworks.launch.agent import _Rank; import sys; _Rank([sys.executable, '-c', sys.argv[1]], env={'RANK': '3'}).wait()"


def ends(run_dir: Path, program: str, **options: str) -> list[dict[str, object]]:
    """The events of a rank that runs a program, started by an agent in a process of its own."""
    variables = os.environ | {VARIABLE: str(LaunchDir.of(run_dir).path), HOST: "node-7"}
    subprocess.run([sys.executable, "-c", options.get("before", "") + START, program], env=variables, check=True)
    report_exits(LaunchDir.of(run_dir), run_dir)
    return events_of(run_dir, "rank_exit")


@pytest.mark.parametrize(
    ("program", "code", "signal"),
    [("raise SystemExit(3)", 3, None), ("import os; os.kill(os.getpid(), 9)", -9, "SIGKILL"), ("import os; os.abort()", -6, "SIGABRT")],
)
def test_code_and_signal_of_a_rank(tmp_path: Path, program: str, code: int, signal: str | None) -> None:
    (event,) = ends(tmp_path, program)
    assert (event["rank"], event["host"], event["code"], event["signal"]) == (3, "node-7", code, signal)
    assert not event["oom_kill"] and abs(float(str(event["ended"])) - time.time()) < 60


def test_a_regular_end_is_no_event_and_makes_no_ledger(tmp_path: Path) -> None:
    assert ends(tmp_path, "pass") == [] and not (tmp_path / LEDGER).exists()


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with 1 GB of memory, where this user may make one."""
    parent = next(control_groups("memory"), None)
    folder = Path(parent or "/") / f"lmworks-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        limit = next((folder / name for name in ("memory.max", "memory.limit_in_bytes") if (folder / name).exists()), None)
        if limit is None:
            pytest.skip("the memory of groups below this one is not limited")
        limit.write_text(str(1 << 30))
        yield folder
    finally:
        folder.rmdir()


def test_a_rank_that_the_kernel_kills_for_want_of_memory(tmp_path: Path, small_group: Path) -> None:
    """The agent is in the same group as its ranks, and the kernel kills the one that has most."""
    join = f"open({str(small_group / 'cgroup.procs')!r}, 'w').write('0'); "
    (event,) = ends(tmp_path, "x = bytearray(b'x') * (3 << 30)", before=join)
    assert (event["code"], event["signal"], event["oom_kill"]) == (-9, "SIGKILL", True)


def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    folder = LaunchDir.of(tmp_path)
    folder.exits.mkdir(parents=True)
    whole = {"rank": 1, "host": "a", "pid": 5, "code": 1, "signal": None, "ended": 7.0, "oom_kill": None}
    (folder.exits / "a.jsonl").write_text(json.dumps(whole) + "\n" + json.dumps({"rank": 2}) + "\n" + '{"rank": 3, "en')
    (folder.exits / "b.jsonl").write_text("no json\n" * 3)
    with Ledger(tmp_path / LEDGER) as ledger:
        ledger.write("start")
    report_exits(folder, tmp_path)
    report_exits(folder, tmp_path)  # what was reported is forgotten
    assert [event["rank"] for event in events_of(tmp_path, "rank_exit")] == [1]


def test_an_unknown_signal_has_no_name() -> None:
    assert agent.describe_exit(0, "a", 1, -99)["signal"] is None
