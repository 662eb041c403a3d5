"""One launch at a time: a second one changes nothing, and ranks without a launcher are waited for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lmworks.errors import UserError
from lmworks.launch import launcher, slurm
from lmworks.launch.launch_dir import LaunchDir
from lmworks.launch.launch_lock import lock_launch
from lmworks.launch.rank import run_rank
from lmworks.launch.supervisor import Supervisor
from lmworks.launch.torchrun import CountRange, Host, HostTable, read_table
from lmworks.recipe.schema.recipe import Recipe
from lmworks.watch.ledger import LAUNCH_LOCK, RunLock, events_of, in_use

RECIPE = Recipe.model_validate({"name": "toy", "threads": 1})


def test_only_ranks_get_the_run_of_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while they are restarted, when none of them holds it."""
    assert not in_use(tmp_path)
    with lock_launch(tmp_path, 0.0):
        assert in_use(tmp_path)
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on "):
            RunLock(tmp_path)
        monkeypatch.setenv("RANK", "0")
        RunLock(tmp_path).release()
    assert not in_use(tmp_path)


def test_a_launch_waits_for_ranks_whose_launcher_was_killed(tmp_path: Path) -> None:
    folder, here, leave = LaunchDir.of(tmp_path), threading.Event(), threading.Event()

    def rank() -> None:
        with folder.attended():
            here.set()
            leave.wait()

    thread = threading.Thread(target=rank, daemon=True)
    thread.start()
    here.wait()
    with pytest.raises(UserError, match=r"ranks of an earlier launch of .* have not ended within 0 s; end them"):
        lock_launch(tmp_path, 0.0)
    threading.Timer(0.2, leave.set).start()
    with lock_launch(tmp_path, 60.0):
        assert leave.is_set()


def test_a_rank_is_alive_while_it_works_and_its_forked_child_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, children = LaunchDir.of(tmp_path), list[int]()
    folder.begin()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}

    def work() -> None:
        assert folder.has_ranks()
        here, there = os.pipe()
        children.append(os.fork())
        if not children[0]:
            os.write(there, b"begun")
            time.sleep(600)
            os._exit(0)
        assert os.read(here, 5) == b"begun"

    try:
        assert run_rank(folder, 0, work) == 0
        assert folder.outcome() == {"code": 0, "rank": 0, "message": ""} and not folder.has_ranks()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


BEGIN = "import sys; from pathlib import Path; from lmworks.launch import slurm; slurm.begin(Path(sys.argv[1]), 0)"


def test_the_shell_of_a_job_holds_the_lock(tmp_path: Path) -> None:
    """The process that takes it ends at once."""
    folder = LaunchDir.of(tmp_path)
    folder.begin()
    folder.request_stop(signal.SIGUSR1)
    command = [sys.executable, "-c", BEGIN, str(tmp_path)]
    with open(tmp_path / LAUNCH_LOCK, "a+b") as shell:
        subprocess.run(command, stdin=shell, check=True)
        assert folder.stop_signal() is None
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on "):
            lock_launch(tmp_path, 0.0)
    lock_launch(tmp_path, 0.0).release()


@pytest.mark.parametrize(
    ("work", "to", "ends"),
    [("run", None, ["finished"]), ("pretrain", "pretrain", ["finished"]), ("profile", "profile", []), ("preflight", "preflight", [])],
)
def test_the_end_of_a_measurement_is_not_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, to: str | None, ends: list[str]
) -> None:
    """And that of the run names the last stage that was asked for."""
    monkeypatch.setattr(Supervisor, "run", lambda self: self.folder.conclude(0, 0) or 0)
    folder = LaunchDir.of(tmp_path)
    HostTable(folder.hosts, [Host("local-0", 2)]).exclude("local-0", "its agent was killed")
    made = launcher.launch_local(RECIPE, tmp_path, CountRange(2, 2), [work, "it.yaml"])
    assert [host.excluded for host in read_table(folder.hosts)] == ["its agent was killed"], "nothing is changed before the lock is taken"
    assert made.run() == 0
    assert [host.excluded for host in read_table(folder.hosts)] == [None]
    script = slurm.job_for(RECIPE, tmp_path, CountRange(1, 1), 2, [work, "it.yaml"]).script()
    assert re.findall(r' end --code "\$code"(.*)\)$', script, re.MULTILINE) == [f" --to {to}" if to else ""]
    slurm.finish_job(RECIPE, tmp_path, 0, to)
    assert [(event["outcome"], event["to"]) for event in events_of(tmp_path, "run_ended")] == [(end, to) for end in ends] * 2
