"""The commands that a launch starts, the table of hosts, and how the exit of a rank is interpreted."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmworks.errors import UserError
from lmworks.launch import launcher, rank, slurm
from lmworks.launch.launch_dir import VARIABLE, LaunchDir
from lmworks.launch.rank import run_rank
from lmworks.launch.rank_context import _report_failure, _stopped_quietly
from lmworks.launch.torchrun import Agent, CountRange, Host, HostTable, find_hosts, read_hosts, read_table
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.terminal import Interrupted
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import Ledger, read_ledger
from lmworks.watch.run_end import RunEnd, remember
from patience import PATIENCE


def recipe(**nodes: Any) -> Recipe:
    return Recipe.model_validate({"name": "toy", "threads": 1, **nodes})


@pytest.mark.parametrize(("text", "minimum", "maximum"), [("4", 4, 4), ("2:4", 2, 4), ("3:3", 3, 3)])
def test_sizes(text: str, minimum: int, maximum: int) -> None:
    assert CountRange.parse(text) == CountRange(minimum, maximum)


@pytest.mark.parametrize("text", ["", "0", "4:2", "0:2", "-1", "2:", ":2", "two", "2:3:4"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="is not a number of ranks"):
        CountRange.parse(text)


def test_a_host_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode-1 slots=8\nnode-2   # borrowed\n\nuser@10.0.0.3 slots = 2\nme@fe80::1\n")
    assert read_hosts(path) == [Host("node-1", 8), Host("node-2", 1), Host("user@10.0.0.3", 2), Host("me@fe80::1", 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node-1 8\n", ":1: 'node-1 8' is not a host"),
        ("a\nb slots=0", ":2: "),
        ("-oProxyCommand=x", ":1: "),
        ("a slots=2\nnode-2:2", ":2: 'node-2:2' is not a host; write for example: node-1 slots=8"),
        ("a\na slots=2", "twice"),
        ("# none", "names no host"),
    ],
)
def test_a_host_file_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UserError, match=message):
        read_hosts(tmp_path / "hosts")
    with pytest.raises(UserError, match="is not a host file"):
        read_hosts(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is not a regular file"):
        read_hosts(tmp_path / "pipe")


def test_an_excluded_host_stays_out_of_later_launches_until_it_is_readmitted(tmp_path: Path) -> None:
    folder = LaunchDir.of(tmp_path)
    hosts = [Host("a", 2), Host("b", 2)]
    HostTable(folder.hosts, hosts).exclude("b", "its disk")
    later = HostTable(folder.hosts, hosts)
    assert [host.name for host in later.active()] == ["a"]
    assert [(host.name, host.excluded) for host in read_table(folder.hosts)] == [("a", None), ("b", "its disk")]
    with pytest.raises(UserError, match=r"^c is not excluded from .*; these are: b$"):
        launcher.readmit(tmp_path, "c")
    launcher.readmit(tmp_path, "b")
    assert folder.take_readmissions() == ["b"] and folder.take_readmissions() == []
    assert later.readmit("b") and not later.readmit("b")
    assert len(HostTable(folder.hosts, hosts).active()) == 2


def test_a_host_that_a_launch_does_not_have_stays_excluded_for_the_next_one(tmp_path: Path) -> None:
    """A job that is requeued gets other nodes."""
    folder = LaunchDir.of(tmp_path)
    HostTable(folder.hosts, [Host("a", 2), Host("bad", 2)]).exclude("bad", "its disk")
    between = HostTable(folder.hosts, [Host("a", 2), Host("c", 2)])
    assert [host.name for host in between.all()] == ["a", "c"]
    assert [host.name for host in read_table(folder.hosts) if host.excluded] == ["bad"]
    assert [host.name for host in HostTable(folder.hosts, [Host("bad", 2), Host("c", 2)]).active()] == ["c"]
    again = HostTable(folder.hosts, [Host("a", 2)])
    assert not again.readmit("bad") and [host.name for host in read_table(folder.hosts)] == ["a"]


def test_hosts_of_a_file_or_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours").write_text("node-1 slots=8\n")
    assert find_hosts("ours") == find_hosts(f"{tmp_path}/ours") == [Host("node-1", 8)]
    assert find_hosts("node-1, me@node-2") == [Host("node-1", 1), Host("me@node-2", 1)] and find_hosts("node-1") == [Host("node-1", 1)]
    wrong = {"./absent": "is not a host file", "a,a": "a is listed twice", "a,-oProxyCommand=x": "is not a host", ",": "names no host"}
    for text, message in wrong.items():
        with pytest.raises(UserError, match=message):
            find_hosts(text)


def test_local_agents_have_as_many_ranks_as_the_layout_needs(tmp_path: Path) -> None:
    fixed = launcher.launch_local(recipe(), tmp_path, CountRange(4, 4), [])
    assert [host.slots for host in fixed.hosts] == [4] and fixed.min_hosts == 1
    elastic = launcher.launch_local(recipe(layout={"tp": 2}), tmp_path, CountRange(2, 6), [])
    assert [host.slots for host in elastic.hosts] == [2, 2, 2] and elastic.min_hosts == 1
    with pytest.raises(UserError, match=r"5 ranks are not a multiple of 2 \(layout tp 2\)"):
        launcher.launch_local(recipe(layout={"tp": 2}), tmp_path, CountRange(2, 5), [])


def test_hosts_are_refused_whose_loss_would_leave_ranks_that_do_not_divide(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"b has 3 slots, .* a multiple of 2"):
        launcher.launch_on_hosts(recipe(layout={"tp": 2}), tmp_path, [Host("a", 4), Host("b", 3)], 1, [], None)
    with pytest.raises(UserError, match="--least 3 is not between 1 and the 2 hosts"):
        launcher.launch_on_hosts(recipe(), tmp_path, [Host("a", 4), Host("b", 3)], 3, [], None)


def test_the_command_of_a_host_goes_through_ssh_as_one_script(tmp_path: Path) -> None:
    made = launcher.launch_on_hosts(
        recipe(launch={"ssh": "ssh -p 22"}), tmp_path / "a run", [Host("n1", 2), Host("n2", 2)], 1, ["run", "it's.yaml"], "head"
    )
    host = made.hosts[0]
    script = made.script(host, 29400)
    assert made.command(script, host) == ["ssh", "-p", "22", "n1", script]
    assert "--nnodes=1:2 --nproc-per-node=2" in script and "--rdzv-endpoint=head:29400" in script
    assert subprocess.run(["sh", "-n"], input=script, encoding="utf-8", check=False).returncode == 0


def test_ranks_that_cannot_be_imported_end_the_launch_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host without lmworks: nothing that such a rank could record, and an agent that would start it for ever."""
    made = replace(launcher.launch_local(recipe(), tmp_path, CountRange(1, 1), []), module="lmworks.nowhere")
    with pytest.raises(UserError, match=r"cannot be restarted: .* exited with code 254 .*No module named 'lmworks.nowhere'"):
        made.run()


def test_the_end_of_whoever_started_an_agent_is_the_agents_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launcher.launch_local(recipe(), tmp_path, CountRange(1, 1), [])
    LaunchDir.of(tmp_path).begin()
    told, ready = tmp_path / "told", tmp_path / "ready"
    stand_in = (
        f"import signal, time, sys, pathlib\nsignal.signal(15, lambda *_: (open({str(told)!r}, 'w').write('15'), sys.exit(3)))\n"
        f"pathlib.Path({str(ready)!r}).touch()\nwhile True: time.sleep(0.05)"  # a signal that comes just before a sleep does not end it
    )
    monkeypatch.setattr("lmworks.launch.torchrun.Agent.command", lambda self: [sys.executable, "-c", stand_in])
    shell = subprocess.Popen(["sh", "-c", made.script(made.hosts[0], 1)], stdin=subprocess.PIPE)
    while not ready.exists():
        assert shell.poll() is None
        time.sleep(0.02)
    assert shell.stdin
    shell.stdin.close()
    assert shell.wait(PATIENCE) == 3 and told.read_text() == "15"


def test_the_shell_of_an_agent_lives_for_as_long_as_its_ranks_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm signals every process of a node at a preemption, and ends the others when the shell has ended."""
    made = launcher.launch_on_hosts(recipe(), tmp_path, [Host("n2", 1)], None, [], "head")
    LaunchDir.of(tmp_path).begin()
    ready = tmp_path / "ready"
    stand_in = (
        "import signal, time, sys, pathlib\nsignal.signal(15, lambda *_: (time.sleep(0.3), sys.exit(5)))\n"
        f"pathlib.Path({str(ready)!r}).touch()\nwhile True: time.sleep(0.05)"  # a signal that comes just before a sleep does not end it
    )
    monkeypatch.setattr("lmworks.launch.torchrun.Agent.command", lambda self: [sys.executable, "-c", stand_in])
    script = replace(made, module="os").script(made.hosts[0], 1)
    shell = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True)
    while not ready.exists():
        assert shell.poll() is None
        time.sleep(0.02)
    os.killpg(shell.pid, signal.SIGTERM)
    assert shell.wait(PATIENCE) == 5


SCRIPT = {"partition": "gpu", "time_limit": "2:00:00", "memory": "100G", "options": ["--constraint=h100"], "setup": ["module load python"]}


def test_the_slurm_script_says_what_the_recipe_asks_for(tmp_path: Path) -> None:
    asked = recipe(launch={"slurm": SCRIPT | {"cpus_per_rank": 3}}, layout={"tp": 2})
    HostTable(LaunchDir.of(tmp_path).hosts, [Host("bad", 1), Host("good", 1)]).exclude("bad", "its disk")
    script = slurm.job_for(asked, tmp_path, CountRange(1, 2), 8, ["run", "a.yaml", "--set", "seed=3"]).script()
    lines = script.splitlines()
    wanted = ["--partition=gpu", "--time=2:00:00", "--mem=100G", "--constraint=h100", "--requeue", "--nodes=1-2", "--ntasks-per-node=1",
              "--cpus-per-task=24", "--signal=B:USR1@120", "--exclude=bad", "--no-kill"]  # fmt: skip
    assert [option for option in wanted if f"#SBATCH {option}" not in lines] == []
    assert lines.index("module load python") < len(lines) - 1
    assert lines[lines.index("code=$?") - 1].endswith("lmworks.cli.rank run a.yaml --set seed=3")
    assert "--gpus" not in script
    assert subprocess.run(["bash", "-n"], input=script, encoding="utf-8", check=False).returncode == 0
    with pytest.raises(UserError, match=r"3 ranks are not a multiple of 2 \(layout tp 2\)"):
        slurm.job_for(asked, tmp_path, CountRange(1, 2), 3, [])


PROGRAMS = {
    # What Slurm does: a node is this machine, and a shell there has the environment of the job.
    "scontrol": 'printf "n1\\nn2\\nn3\\n"',
    "srun": 'echo "$@" >"$OUT/srun"; while [ "$1" != bash ]; do shift; done; exec "$@"',
    # In place of `lmworks launch`; `nodes` runs a script on a node, as the supervisor does.
    "launch": """case "$*" in
      "nodes "*) echo "$@" >"$OUT/nodes"; eval "on_node=($ON_NODE)"; echo hello | "${on_node[@]}" n2 "$SCRIPT";;
      *" begin") flock -n 0;;
      *" end "*) flock -n "$LMWORKS_LAUNCH/lock" true || echo held >"$OUT/held"; echo "$@" >"$OUT/end";;
    esac""",
}
# Slurm signals the shell of a step at a preemption.
ON_A_NODE = 'read said; echo $said >"$OUT/said"; kill -TERM $PPID; sleep 0.3; exit 3'


def test_a_job_with_spares_supervises_all_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(slurm, "_LMWORKS", (str(tmp_path / "launch"),))
    folder = LaunchDir.of(tmp_path / "a run")
    folder.begin()
    made = slurm.job_for(
        recipe(), tmp_path / "a run", CountRange(1, 2), 4, ["run", "it.yaml"], spares=1, again=["it's.yaml", "--to", "pretrain"]
    )
    script = made.script()
    assert {"#SBATCH --nodes=2-3", "#SBATCH --no-kill"} <= set(script.splitlines())
    launch = slurm.launch_on_nodes(recipe(), tmp_path / "a run", [Host("n1", 4), Host("n2", 4)], 1, [], "n1", 1)
    *on_node, host, last = launch.command("SCRIPT", launch.hosts[0])
    assert (host, last, launch.size) == ("n1", "SCRIPT", 1)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
    variables |= {"ON_NODE": shlex.join(on_node), "SCRIPT": ON_A_NODE}
    assert subprocess.run(["bash", "-c", script], env=os.environ | variables, check=False, timeout=PATIENCE).returncode == 0
    assert read_hosts(folder.path / "nodes") == [Host("n1", 4), Host("n2", 4), Host("n3", 4)]
    words = (tmp_path / "nodes").read_text().strip()
    assert words == f"nodes it's.yaml --to pretrain --least 1 --spares 1 --hosts {folder.path}/nodes --address n1"
    assert (tmp_path / "said").read_text() == "hello\n", "a script on a node ends with the pipe of its supervisor, so it has to get it"
    options = (tmp_path / "srun").read_text()
    assert "--overlap --nodes=1 --ntasks=1" in options and "--nodelist=n2" in options
    assert folder.stop_signal() == signal.SIGUSR1, "all ranks are asked to save"
    assert (tmp_path / "end").read_text().split()[-2:] == ["--code", "3"]
    assert (tmp_path / "held").exists(), "the shell of the job has the lock until it ends"


@pytest.mark.parametrize(
    ("said", "of_the_cluster", "asked_for"), [(None, 8, "8"), (4, 8, "4"), (4, None, "4"), (0, 8, None), (None, None, None)]
)
def test_gpus_are_asked_for_as_the_recipe_or_the_cluster_says(
    tmp_path: Path, said: int | None, of_the_cluster: int | None, asked_for: str | None
) -> None:
    asked = recipe(launch={"slurm": {"gpus_per_node": said, "memory": "all", "qos": "high"}})
    lines = slurm.job_for(asked, tmp_path / "a run", CountRange(2, 2), 8, [], of_the_cluster).script().splitlines()
    assert [line for line in lines if line.startswith("#SBATCH --gpus")] == ([f"#SBATCH --gpus-per-node={asked_for}"] if asked_for else [])
    assert {"#SBATCH --mem=0", "#SBATCH --qos=high", f"#SBATCH --output='{tmp_path}/a run/launch/slurm-%j.log'"} <= set(lines)


def crash(run_dir: Path, asked: Recipe) -> slurm.JobResult:
    LaunchDir.of(run_dir).begin()
    return slurm.finish_job(asked, run_dir, 1)


def test_a_job_that_crashes_is_tried_again_as_long_as_it_gets_on(tmp_path: Path) -> None:
    asked = recipe(launch={"max_restarts": 2})
    assert [crash(tmp_path, asked).code for _ in range(2)] == [75, 75]
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.write("checkpoint", step=5)
    assert [crash(tmp_path, asked).code for _ in range(3)] == [75, 75, 1]
    assert sum(event["event"] == "requeue" for event in read_ledger(tmp_path / "ledger.jsonl")) == 4


@pytest.mark.parametrize(("code", "then"), [(0, 0), (2, 2), (130, 130), (75, 75)])
def test_a_job_is_queued_again_after_a_preemption_and_not_when_it_is_over(tmp_path: Path, code: int, then: int) -> None:
    for _ in range(5):  # being preempted is no failure, however often
        LaunchDir.of(tmp_path).begin()
        LaunchDir.of(tmp_path).conclude(code, 0)
        assert slurm.finish_job(recipe(), tmp_path, 0).code == then


def test_a_node_whose_ranks_fail_again_and_again_is_left_out(tmp_path: Path) -> None:
    LaunchDir.of(tmp_path).begin()
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        for hosts in (["n7"], ["n7"], ["n1", "n7"], ["n7"]):
            ledger.write("restart", hosts=hosts, ranks=[1], reason="killed")
    assert slurm.finish_job(recipe(launch={"exclude_after_failures": 4}), tmp_path, 1).excluded == ()
    assert slurm.finish_job(recipe(launch={"exclude_after_failures": 3}), tmp_path, 1).excluded == ("n7",)
    assert slurm.finish_job(recipe(launch={"exclude_after_failures": 3}), tmp_path, 1).excluded == ("n7",)


def test_what_a_node_did_before_it_was_readmitted_is_not_counted(tmp_path: Path) -> None:
    folder, asked = LaunchDir.of(tmp_path), recipe(launch={"exclude_after_failures": 2})
    folder.begin()
    table = HostTable(folder.hosts, [Host("n1", 1), Host("n7", 1)])
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        for _ in range(2):
            ledger.write("restart", hosts=["n7"], ranks=[1], reason="killed")
        table.exclude("n7", "its ranks failed")
        time.sleep(0.01)
        assert table.readmit("n7")
        assert slurm.finish_job(asked, tmp_path, 1).excluded == ()
        time.sleep(0.01)
        for then in ((), ("n7",)):
            ledger.write("restart", hosts=["n7"], ranks=[1], reason="killed")
            assert slurm.finish_job(asked, tmp_path, 1).excluded == then


def ends_with(code: int) -> Callable[[], None]:
    return lambda: sys.exit(code)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchDir]:
    made = LaunchDir.of(tmp_path)
    made.begin()
    monkeypatch.setattr(rank, "_FIRST_RANK_SECONDS", 0.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    monkeypatch.setattr(rank, "_output", lambda folder, number: nullcontext())
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_rank_speaks_for_all_when_the_run_is_done(folder: LaunchDir) -> None:
    assert run_rank(folder, 0, ends_with(0)) == 0
    assert folder.outcome() == {"code": 0, "rank": 0, "message": ""}


def test_a_rank_that_is_done_waits_for_the_first_one_to_say_so(folder: LaunchDir) -> None:
    threading.Timer(0.2, lambda: folder.conclude(0, 0)).start()
    assert run_rank(folder, 1, ends_with(0)) == 0 and folder.outcome() is not None


def test_a_rank_that_was_told_it_is_done_by_one_that_was_stopped_is_started_again(
    folder: LaunchDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank tells the others so whenever it leaves, also when torchrun stops it. After code 0 their agents would sit idle."""
    with monkeypatch.context() as patched:
        patched.setattr(rank, "_OUTCOME_SECONDS", 0.1)
        assert run_rank(folder, 1, ends_with(0)) == 1
    folder.give_up_group()
    late = threading.Timer(0.3, lambda: folder.conclude(0, 0))
    late.start()
    assert run_rank(folder, 1, ends_with(0)) == 1
    late.cancel()


@pytest.mark.parametrize("asked", [False, True], ids=["torchrun", "launcher"])
def test_a_rank_that_waits_for_the_first_one_makes_way_for_torchrun(
    folder: LaunchDir, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """It stops all ranks when a host joins. A launcher's request to stop is for the first rank, which then records its end."""
    monkeypatch.setattr(rank.os, "_exit", sys.exit)
    monkeypatch.setattr(rank, "_messages", lambda folder: nullcontext())  # whose thread passes the request on, perhaps after this test

    def strike() -> None:
        if asked:
            folder.request_stop(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        folder.conclude(75, 0)

    later = threading.Timer(0.2, strike)
    later.start()
    if asked:
        assert run_rank(folder, 1, ends_with(0)) == 0
        return
    with pytest.raises(SystemExit) as stop:
        run_rank(folder, 1, ends_with(0))
    assert stop.value.code == 1 and folder.outcome() is None
    later.join()


def test_ranks_that_were_told_to_leave_have_not_failed(tmp_path: Path) -> None:
    """What is known of the last failure is kept."""
    folder = LaunchDir.of(tmp_path)
    folder.begin()
    for given_up in (False, True):
        beat = Heartbeat(folder.heartbeats)
        beat.share()
        beat.end("cut", "its collective timed out")
        folder.records.mkdir(parents=True, exist_ok=True)
        (folder.records / f"rank_{int(given_up)}").touch()
        if given_up:
            folder.give_up_group()
        folder.failed.touch()
        assert _report_failure(folder, tmp_path, 2, 9) is None
        assert not folder.failed.exists() and not list(folder.heartbeats.glob("*.json"))
    assert [event["event"] for event in read_ledger(tmp_path / "ledger.jsonl")] == ["restart", "resized"]
    assert [path.name for path in folder.last_records.iterdir()] == ["rank_0"] and not list(folder.records.iterdir())


def test_a_failure_is_not_hidden_by_a_group_that_is_given_up_a_moment_later(folder: LaunchDir) -> None:
    folder.failed.touch()
    folder.give_up_group()
    assert not folder.is_group_given_up()


def test_a_full_disk_can_end_a_run(folder: LaunchDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the ranks would be restarted forever, because none could record the outcome."""
    folder.begin()

    def full(path: Path, data: bytes) -> None:
        raise UserError(f"the disk of {path} is full")

    monkeypatch.setattr("lmworks.launch.launch_dir.write_bytes", full)
    assert run_rank(folder, 0, ends_with(2)) == 0
    outcome = folder.outcome()
    assert outcome is not None and outcome["code"] == 2


def test_a_crash_is_torchruns_to_start_again(folder: LaunchDir) -> None:
    def broken() -> None:
        raise ArithmeticError("broken")

    assert run_rank(folder, 0, broken) == 1 and folder.outcome() is None


def test_the_users_fault_on_any_rank_ends_the_run(folder: LaunchDir) -> None:
    assert run_rank(folder, 3, ends_with(2)) == 0
    assert json.loads((folder.path / "outcome.json").read_text())["rank"] == 3
    assert run_rank(folder, 0, lambda: pytest.fail("the run is over")) == 0


def test_a_user_error_ends_the_run_with_its_line(folder: LaunchDir, capfd: pytest.CaptureFixture[str]) -> None:
    """Also of work that is no command, so that nothing else prints it. torchrun would start the ranks again for ever."""

    def refused() -> None:
        raise UserError("the disk is full; free some space")

    assert run_rank(folder, 3, refused) == 0
    assert folder.outcome() == {"code": 2, "rank": 3, "message": "", "reason": "the disk is full; free some space"}
    assert capfd.readouterr().err == "error: the disk is full; free some space\n"


def test_a_signal_that_stops_a_rank_is_no_reason(folder: LaunchDir) -> None:
    def stopped() -> None:
        remember(RunEnd.of_error(stop := SystemExit(75)))
        raise stop

    folder.request_stop(signal.SIGTERM)
    assert run_rank(folder, 0, stopped) == 0
    assert folder.outcome() == {"code": 75, "rank": 0, "message": ""}


def test_a_collective_that_fails_because_the_ranks_stop_is_no_failure(
    folder: LaunchDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of work that is no command."""
    monkeypatch.setenv(VARIABLE, str(folder.path))

    def cut() -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"), _stopped_quietly():
        cut()
    folder.request_stop(signal.SIGINT)
    with pytest.raises(Interrupted, match="stopped by SIGINT"), _stopped_quietly():  # which the heartbeat takes for no failure
        cut()
    with pytest.raises(ArithmeticError), _stopped_quietly():
        raise ArithmeticError("broken")
    assert run_rank(folder, 0, cut) == 0
    assert folder.outcome() == {"code": 130, "rank": 0, "message": ""} and not capfd.readouterr().err


def test_a_rank_that_is_stopped_does_not_keep_the_first_one_waiting_for_it(folder: LaunchDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "_STOPPED_SECONDS", 0.1)
    monkeypatch.setattr(rank, "_messages", lambda folder: nullcontext())
    folder.request_stop(signal.SIGINT)
    late = threading.Timer(3.0, lambda: folder.conclude(130, 0))
    late.start()
    assert run_rank(folder, 1, ends_with(130)) == 1
    late.cancel()


@pytest.mark.parametrize("code", [75, 130])
def test_only_a_request_of_the_launcher_ends_the_run_by_a_signal(folder: LaunchDir, code: int) -> None:
    """torchrun also sends SIGTERM when another rank has failed or a node has joined; the run must continue then."""
    assert run_rank(folder, 0, ends_with(code)) == code and folder.outcome() is None
    folder.request_stop(signal.SIGTERM)
    assert run_rank(folder, 0, ends_with(code)) == 0
    assert folder.outcome() == {"code": code, "rank": 0, "message": ""}


def test_what_a_launch_sets_is_refused_in_a_recipe(tmp_path: Path) -> None:
    """Except the interface of a launch on one machine, which a recipe for several may set for those."""
    folder = LaunchDir.of(tmp_path)
    agent = Agent(folder, CountRange(1, 1), 1, "127.0.0.1:1", "x", [], 1.0, "127.0.0.1", variables={"GLOO_SOCKET_IFNAME": "ib0"})
    given = agent.environment("here")
    assert given["GLOO_SOCKET_IFNAME"] == "lo"
    for name in given.keys() - {"GLOO_SOCKET_IFNAME"}:
        with pytest.raises(ValueError, match="is set by lmworks"):
            recipe(launch={"environment": {name: "1"}})


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_request_to_stop_that_comes_at_the_end_does_not_keep_the_end_from_being_recorded(
    folder: LaunchDir, monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:  # fmt: skip
    """The first rank hears of it from the others, and of the request itself a moment later."""
    honest = LaunchDir.conclude

    def conclude(self: LaunchDir, code: int, rank: int, **said: str) -> None:
        os.kill(os.getpid(), by)
        time.sleep(0.01)
        honest(self, code, rank, **said)

    monkeypatch.setattr(LaunchDir, "conclude", conclude)
    folder.request_stop(by)
    assert run_rank(folder, 0, ends_with(75)) == 0
    assert folder.outcome() == {"code": 75, "rank": 0, "message": ""}


def test_spares_are_hosts_that_run_nothing_at_first(tmp_path: Path) -> None:
    hosts = [Host("a", 4), Host("b", 4), Host("c", 4)]
    made = launcher.launch_on_hosts(recipe(), tmp_path, hosts, None, [], "head", spares=1)
    assert (made.size, made.min_hosts) == (2, 2) and "--nnodes=2:2" in made.script(hosts[2], 29400)
    with pytest.raises(UserError, match="--spares 3 leaves none of the 3 hosts of the file to run on"):
        launcher.launch_on_hosts(recipe(), tmp_path, hosts, None, [], None, spares=3)
    with pytest.raises(UserError, match="--least 3 is not between 1 and the 2 hosts that are no spares"):
        launcher.launch_on_hosts(recipe(), tmp_path, hosts, 3, [], None, spares=1)
    with pytest.raises(UserError, match="c is a spare with 2 slots, so all hosts need as many"):
        launcher.launch_on_hosts(recipe(), tmp_path, [*hosts[:2], Host("c", 2)], None, [], None, spares=1)


def test_a_spare_fills_its_cache_with_a_command_that_ends_with_the_launcher(tmp_path: Path) -> None:
    made = launcher.launch_on_hosts(recipe(), tmp_path, [Host("a", 1), Host("b", 1)], None, [], "head", spares=1)
    script = made.agent(made.hosts[1], 29400).cache_script("b", Path.cwd(), tmp_path)
    assert f"lmworks.cli.main data cache {tmp_path} --follow {tmp_path}/launch/spares/b.json" in script
    assert subprocess.run(["sh", "-n"], input=script, encoding="utf-8", check=False).returncode == 0
