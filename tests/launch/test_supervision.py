"""Real torchrun and real ranks that train a toy model: failed ranks are restarted, and the rank that caused it is named."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from lmworks.launch import launcher, slurm, torchrun
from lmworks.launch.launch_dir import LaunchDir
from lmworks.launch.torchrun import CountRange, Host, read_table
from lmworks.recipe.schema.recipe import Recipe
from lmworks.watch.heartbeat import read_local_beats
from lmworks.watch.ledger import read_ledger
from node_recording import record
from patience import PATIENCE
from slurm_cluster import cluster

STEPS = 30
DOCS = Path(__file__).parents[2] / "docs"
TOY = Path(__file__).parent


@pytest.fixture(autouse=True)
def _ranks_find_the_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TOY), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def prepare(run_dir: Path, fault: dict[str, Any] | None = None, **launch: Any) -> Recipe:
    run_dir.mkdir(exist_ok=True)
    recipe = Recipe.model_validate({"name": "toy", "threads": 1, "launch": {"timeout": "5 s", **launch}})
    (run_dir / "recipe.json").write_text(recipe.model_dump_json())
    if fault:
        break_rank(run_dir, **fault)
    return recipe


def break_rank(run_dir: Path, rank: int, **fault: Any) -> None:
    (run_dir / f"fault-{rank}.json").write_text(json.dumps({"once": True} | fault))


def toy(launch: launcher.Launch) -> launcher.Launch:
    return replace(launch, module="toy_rank")


def local(run_dir: Path, recipe: Recipe, ranks: str, steps: int = STEPS) -> launcher.Launch:
    return toy(launcher.launch_local(recipe, run_dir, CountRange.parse(ranks), [str(run_dir), str(steps)]))


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_ledger(run_dir / "ledger.jsonl") if event["event"] == name]


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def require_every_step(run_dir: Path, steps: int = STEPS) -> None:
    """Assert that every step was done, and that only steps since the last checkpoint were repeated."""
    done = [event["step"] for event in events(run_dir, "step")]
    assert sorted(set(done)) == list(range(steps))
    assert len(done) <= steps + 5 * (len(events(run_dir, "restart")) + len(events(run_dir, "resized")))


def in_background(run: Callable[[], int]) -> tuple[threading.Thread, list[int]]:
    """Run the supervisor in a thread, where it handles no signals."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run()), daemon=True)
    thread.start()
    return thread, codes


def test_a_rank_that_is_killed_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    recipe = prepare(run_dir, {"rank": 1, "step": 7, "kind": "kill"})
    assert local(run_dir, recipe, "2").run() == 0
    require_every_step(run_dir)
    (restart,) = events(run_dir, "restart")
    assert (restart["ranks"], restart["hosts"], restart["step"], restart["in_a_row"]) == ([1], ["local-0"], 7, 1)
    assert "rank 1 on local-0" in restart["reason"] and "ended without an error message" in restart["reason"]
    exits = {event["rank"]: event for event in events(run_dir, "rank_exit")}
    killed, other = exits[1], exits[0]
    assert (killed["host"], killed["code"], killed["signal"], killed["oom_kill"]) == ("local-0", -9, "SIGKILL", False)
    assert other["code"] != 0 and other["signal"] != "SIGKILL" and killed["pid"] != other["pid"]
    assert not killed["asked"]
    assert not list(LaunchDir.of(run_dir).exits.iterdir())


def test_a_rank_that_has_no_time_to_notice_that_another_was_killed_is_not_blamed(tmp_path: Path) -> None:
    """The other rank is in no collective, and torchrun's SIGTERM ends it at once: it has reported as little as the one that was lost."""
    run_dir = tmp_path / "run"
    recipe = prepare(run_dir, {"rank": 1, "step": 7, "kind": "kill"})
    break_rank(run_dir, 0, step=7, kind="mute")
    assert local(run_dir, recipe, "2").run() == 0
    (restart,) = events(run_dir, "restart")
    assert restart["ranks"] == [1] and "rank 1 on local-0" in restart["reason"]
    assert {event["rank"]: event["asked"] for event in events(run_dir, "rank_exit")} == {0: True, 1: False}


@pytest.mark.slow
def test_ranks_go_on_while_the_shared_folder_does_not_answer(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    recipe = prepare(run_dir, {"rank": 1, "step": 7, "kind": "unanswered"}, timeout="60 s")
    assert local(run_dir, recipe, "2").run() == 0
    require_every_step(run_dir)
    times = [event["time"] for event in events(run_dir, "step")]
    assert not events(run_dir, "restart") and max(later - before for before, later in pairwise(times)) < 8


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "told"), [("hang", "was alive but did not enter the collective"), ("freeze", "stopped responding")])
def test_a_hang_in_a_collective_is_named_with_the_rank_and_the_collective(tmp_path: Path, kind: str, told: str) -> None:
    run_dir = tmp_path / "run"
    recipe = prepare(run_dir, {"rank": 1, "step": 7, "kind": kind})
    assert local(run_dir, recipe, "2").run() == 0
    require_every_step(run_dir)
    (restart,) = events(run_dir, "restart")
    assert restart["ranks"] == [1] and told in restart["reason"] and "missing from all_reduce" in restart["reason"]
    records = LaunchDir.of(run_dir).last_records
    analyzer = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", records, "--allow-incomplete-ranks"]
    done = subprocess.run(analyzer, capture_output=True, encoding="utf-8")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    if kind == "hang":
        assert "collective: gloo:all_reduce" in said and "missing ranks: {1}" in said and "toy_rank.py" in said
    else:
        assert [path.name for path in records.iterdir()] == ["rank_0"], "a frozen process writes nothing"


@pytest.mark.slow
def test_a_rank_that_always_breaks_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    recipe = prepare(run_dir, {"rank": 1, "step": 7, "kind": "error", "once": False}, max_restarts=1)
    assert local(run_dir, recipe, "2").run() == 2
    assert [event["in_a_row"] for event in events(run_dir, "restart")] == [1, 2]
    assert [event["code"] for event in events(run_dir, "rank_exit") if event["rank"] == 1] == [1, 1]
    assert "rank 1 on local-0" in (reason := events(run_dir, "restart")[-1]["reason"]) and "ArithmeticError: the toy is broken" in reason


@pytest.mark.slow
def test_ranks_that_never_meet_are_not_started_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    # the rank that waits for the other one hears no signal, and is killed after the grace period
    recipe = prepare(run_dir, {"rank": 0, "step": -1, "kind": "error", "once": False}, grace_period="1 s")
    begin = LaunchDir.begin

    def nearly(folder: LaunchDir) -> None:
        begin(folder)
        folder.failed_starts.write_bytes(b"." * 19)  # one more is allowed

    monkeypatch.setattr(LaunchDir, "begin", nearly)
    assert local(run_dir, recipe, "2").run() == 1
    outcome = LaunchDir.of(run_dir).outcome()
    assert outcome is not None and outcome["message"].startswith("the ranks were started 20 times without a successful rendezvous; see ")


@pytest.mark.slow
@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_a_request_to_stop_reaches_all_ranks_and_they_save_and_leave(tmp_path: Path, by: signal.Signals, code: int) -> None:
    run_dir = tmp_path / "run"
    launch = local(run_dir, prepare(run_dir), "2", steps=100_000)
    timer = threading.Thread(target=lambda: (wait_for(lambda: len(events(run_dir, "step")) > 3), os.kill(os.getpid(), by)), daemon=True)
    timer.start()
    assert launch.run() == code
    last = events(run_dir, "step")[-1]["step"]
    assert events(run_dir, "checkpoint")[-1]["step"] == last + 1
    assert not events(run_dir, "restart")


@pytest.mark.slow
def test_a_world_shrinks_and_grows_back(tmp_path: Path) -> None:
    """An agent is killed with its rank, and the run continues on the others; after the host is readmitted, it runs on all again."""
    run_dir = tmp_path / "run"
    launch = local(run_dir, prepare(run_dir, timeout="20 s"), "2:3", steps=3000)
    thread, codes = in_background(launch.run)
    widths = lambda: [event["ranks"] for event in events(run_dir, "step")]  # noqa: E731
    wait_for(lambda: widths()[-3:] == [3, 3, 3])
    victim = next(beat for beat in read_local_beats(LaunchDir.of(run_dir).heartbeats) if beat.rank == 2)
    agent = psutil.Process(victim.pid).ppid()
    os.kill(agent, signal.SIGKILL)
    os.kill(victim.pid, signal.SIGKILL)
    wait_for(lambda: widths()[-3:] == [2, 2, 2])
    assert [host.name for host in read_table(LaunchDir.of(run_dir).hosts) if host.excluded] == [victim.host]
    assert events(run_dir, "restart")[-1]["ranks"] == [2] and (events(run_dir, "restart")[-1]["now"] == 2)
    launcher.readmit(run_dir, victim.host)
    wait_for(lambda: widths()[-3:] == [3, 3, 3])
    LaunchDir.of(run_dir).request_stop(signal.SIGTERM)
    thread.join(PATIENCE)
    assert codes == [75]
    saved = events(run_dir, "checkpoint")[-1]["step"]
    require_every_step(run_dir, saved)


SSH = """\
#!/bin/sh
# Runs the command on this machine, as sshd would, unless the host is down.
[ -e "{down}/$1" ] && {{ echo "ssh: connect to host $1: No route to host" >&2; exit 255; }}
exec sh -c "$2"
"""


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_is_excluded_with_the_reason(tmp_path: Path) -> None:
    run_dir, ssh = tmp_path / "run", tmp_path / "ssh"
    ssh.write_text(SSH.format(down=tmp_path))
    ssh.chmod(0o755)
    (tmp_path / "n2").touch()
    recipe = prepare(run_dir, ssh=str(ssh))
    hosts = [Host("n1", 1), Host("n2", 1), Host("n3", 1)]
    launch = toy(launcher.launch_on_hosts(recipe, run_dir, hosts, 2, [str(run_dir), str(STEPS)], "127.0.0.1"))
    assert launch.run() == 0
    require_every_step(run_dir)
    assert {event["ranks"] for event in events(run_dir, "step")} == {2}
    table = {host.name: host.excluded for host in read_table(LaunchDir.of(run_dir).hosts)}
    assert table["n1"] is table["n3"] is None and "exited with code 255" in str(table["n2"])


SSHD = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
"""


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.needs("sshd")
def test_a_real_sshd(tmp_path: Path) -> None:
    sshd = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
    assert sshd
    port = 40000 + os.getpid() % 20000
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    (tmp_path / "conf").write_text(SSHD.format(port=port, folder=tmp_path))
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([sshd, "-D", "-f", str(tmp_path / "conf")])
    try:
        wait_for(lambda: listens(port))
        options = (
            f"-p {port} -i {tmp_path}/key -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        )
        run_dir = tmp_path / "run"
        recipe = prepare(run_dir, {"rank": 1, "step": 7, "kind": "kill"}, ssh=f"ssh {options}")
        launch = toy(launcher.launch_on_hosts(recipe, run_dir, [Host("127.0.0.1", 2)], None, [str(run_dir), str(STEPS)], None))
        script = launch.script
        exported = f"export PYTHONPATH={os.environ['PYTHONPATH']} OMP_NUM_THREADS=1\n"
        object.__setattr__(launch, "script", lambda host, at: exported + script(host, at))  # sshd passes no environment on
        assert launch.run() == 0
        require_every_step(run_dir)
        assert events(run_dir, "restart")[0]["hosts"] == ["127.0.0.1"]
    finally:
        server.terminate()
        server.wait()


def told(number: str) -> str:
    return subprocess.run(["scontrol", "show", "job", number], capture_output=True, encoding="utf-8", check=False).stdout


@pytest.mark.slow
@pytest.mark.needs("slurm")
def test_nodes_of_a_slurm_job_that_are_sick_or_fail_are_replaced_by_spares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four nodes has a memory error, and a rank is killed on another; two are needed."""
    (tmp_path / "slurm").mkdir()
    run_dir = tmp_path / "the run"
    for name in ("healthy", "sick"):
        record(tmp_path / name, tmp_path)
    (tmp_path / "sick/sys/devices/system/edac/mc/mc0/ue_count").write_text("1")
    machine = tmp_path / "machine.sh"  # each shell of a node begins with it
    machine.write_text(f'[ "$SLURMD_NODENAME" = n2 ] && name=sick || name=healthy; export LMWORKS_MACHINE=recorded={tmp_path}/$name\n')
    options = {"partition": "all", "setup": [f"export BASH_ENV={machine}"]}
    recipe = prepare(run_dir, {"rank": 1, "step": 7, "kind": "kill"}, slurm=options, exclude_after_failures=1, timeout="60 s")
    (run_dir / "resolved.json").write_text(recipe.model_dump_json())
    monkeypatch.setattr(slurm, "_LMWORKS", (sys.executable, str(TOY / "toy_job.py")))
    with cluster(tmp_path / "slurm", nodes=4) as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        again = [str(run_dir), str(STEPS)]
        number = slurm.job_for(recipe, run_dir, CountRange(2, 2), 1, again, spares=2, again=again).submit()
        wait_for(lambda: any(f"JobState={state}" in told(number) for state in ("COMPLETED", "FAILED")))
        assert "JobState=COMPLETED" in told(number), next((run_dir / "launch").glob("slurm-*.log")).read_text()
    require_every_step(run_dir)
    excluded = {host.name: str(host.excluded) for host in read_table(LaunchDir.of(run_dir).hosts) if host.excluded}
    assert len(excluded) == 2 and "1 uncorrected" in excluded["n2"], excluded
    (lost,) = excluded.keys() - {"n2"}
    assert "its ranks alone caused the last failure" in excluded[lost]
    assert [(event["host"], event["instead_of"]) for event in events(run_dir, "host_started")] == [("n3", "n2"), ("n4", lost)]
    assert {event["ranks"] for event in events(run_dir, "step")} == {2}


def health_program(tmp_path: Path) -> Path:
    """The HealthCheckProgram of docs/running.md for nodes that are one machine: n2 is sick once there is a file `sick.now`. It takes the
    node down, so that a job which is running there loses it."""
    (script,) = re.findall(r"```text\n(#!/bin/sh\n# /etc/slurm/health.sh.*?)```", (DOCS / "running.md").read_text(), re.DOTALL)
    command = f"{sys.executable} -P -m lmworks.cli.main health {tmp_path} --only memory_errors"
    choice = f'[ "$SLURMD_NODENAME" = n2 ] && [ -e {tmp_path}/sick.now ] && name=sick || name=healthy'
    environment = f"PATH={os.environ['PATH']}\nexport PATH SLURM_CONF={tmp_path}/slurm/slurm.conf LMWORKS_MACHINE=recorded={tmp_path}/$name"
    for there, here in (
        ("#!/bin/sh\n", f"#!/bin/sh\n{choice}\n{environment}\n"), ("lmworks health /scratch", command),
        ("$(hostname -s)", "$SLURMD_NODENAME"), ("State=DRAIN", "State=DOWN"),
    ):  # fmt: skip
        assert there in script
        script = script.replace(there, here, 1)
    program = tmp_path / "health.sh"
    program.write_text(script)
    program.chmod(0o755)
    return program


@pytest.mark.slow
@pytest.mark.needs("slurm")
def test_a_node_whose_health_check_program_fails_is_replaced_by_a_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the run goes on, Slurm's own check of a node finds a memory error."""
    (tmp_path / "slurm").mkdir()
    run_dir = tmp_path / "the run"
    for name in ("healthy", "sick"):
        record(tmp_path / name, tmp_path)
    (tmp_path / "sick/sys/devices/system/edac/mc/mc0/ue_count").write_text("1")
    options = {"partition": "all", "setup": [f"export LMWORKS_MACHINE=recorded={tmp_path}/healthy"]}
    recipe = prepare(run_dir, slurm=options, timeout="60 s")
    (run_dir / "resolved.json").write_text(recipe.model_dump_json())
    monkeypatch.setattr(slurm, "_LMWORKS", (sys.executable, str(TOY / "toy_job.py")))
    checked = f"HealthCheckProgram={health_program(tmp_path)}\nHealthCheckInterval=10\nHealthCheckNodeState=ANY\n"
    steps = 600
    with cluster(tmp_path / "slurm", nodes=3, options=checked) as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        again = [str(run_dir), str(steps)]
        number = slurm.job_for(recipe, run_dir, CountRange(2, 2), 1, again, spares=1, again=again).submit()
        wait_for(lambda: events(run_dir, "step") or "JobState=FAILED" in told(number))
        (tmp_path / "sick.now").touch()
        wait_for(lambda: any(f"JobState={state}" in told(number) for state in ("COMPLETED", "FAILED")))
        assert "JobState=COMPLETED" in told(number), next((run_dir / "launch").glob("slurm-*.log")).read_text()
    said = (tmp_path / "slurm" / "slurmctld.log").read_text()
    assert "node n2 reason set to: lmworks health: memory errors: 1 uncorrected" in said and "node n2 state set to DOWN" in said
    require_every_step(run_dir, steps)
    excluded = {host.name: str(host.excluded) for host in read_table(LaunchDir.of(run_dir).hosts) if host.excluded}
    assert set(excluded) == {"n2"}, excluded
    assert [(event["host"], event["instead_of"]) for event in events(run_dir, "host_started")] == [("n3", "n2")]


@pytest.mark.slow
@pytest.mark.needs("slurm")
def test_a_slurm_job_that_is_warned_or_pre_empted_saves_and_is_queued_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First a warning before the time limit, then a preemption by a job of a partition with priority; the run resumes each time."""
    (tmp_path / "slurm").mkdir()
    run_dir, steps = tmp_path / "the run", 200
    recipe = prepare(run_dir, slurm={"gpus_per_node": 2, "memory": "all", "time_limit": "1:00:00", "partition": "all"})
    (run_dir / "resolved.json").write_text(recipe.model_dump_json())
    monkeypatch.setattr(torchrun.Agent, "module", "toy_rank")
    defaults = torchrun.Agent.__init__.__defaults__
    assert "lmworks.cli.rank" in defaults
    toy = tuple("toy_rank" if value == "lmworks.cli.rank" else value for value in defaults)
    monkeypatch.setattr(torchrun.Agent.__init__, "__defaults__", toy)

    def done() -> int:
        return len(events(run_dir, "step"))

    def wait_for_the_next(requeues: int) -> None:
        wait_for(lambda: len(events(run_dir, "requeue")) == requeues)
        before = done()
        # Slurm delays a requeued job by two minutes, and cannot requeue it within the same second.
        asked = ["scontrol", "update", f"JobId={number}", "StartTime=now+10"]
        wait_for(lambda: "PENDING" in told(number) and subprocess.run(asked, check=False).returncode == 0)
        wait_for(lambda: done() > before + 3)

    with cluster(tmp_path / "slurm") as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        number = slurm.job_for(recipe, run_dir, CountRange(1, 1), 2, [str(run_dir), str(steps)]).submit()
        wait_for(lambda: done() > 3)
        assert "gpu:2" in told(number)
        subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True)
        wait_for_the_next(1)
        urgent = ["sbatch", "--parsable", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"]
        before = subprocess.run(urgent, capture_output=True, encoding="utf-8", check=True).stdout.strip()
        wait_for(lambda: "COMPLETED" in told(before))
        wait_for_the_next(2)
        wait_for(lambda: (LaunchDir.of(run_dir).outcome() or {}).get("code") == 0)
        wait_for(lambda: not subprocess.run(["squeue", "--noheader"], capture_output=True, encoding="utf-8", check=True).stdout.strip())

        cancelled = tmp_path / "cancelled"
        prepare(cancelled)
        (cancelled / "resolved.json").write_text(recipe.model_dump_json())
        number = slurm.job_for(recipe, cancelled, CountRange(1, 1), 2, [str(cancelled), "100000"]).submit()
        wait_for(lambda: len(events(cancelled, "step")) > 3)
        subprocess.run(["scancel", number], check=True)
        wait_for(lambda: not subprocess.run(["squeue", "--noheader"], capture_output=True, encoding="utf-8", check=True).stdout.strip())
        assert "JobState=CANCELLED" in told(number)
    assert events(cancelled, "checkpoint"), "it saved, and did not queue itself again"
    for event in events(run_dir, "requeue"):
        assert not event["crashed"] and "preempted" in event["reason"]
    require_every_step(run_dir, steps)
    assert len({event["step"] for event in events(run_dir, "step")}) == done(), "it went on where it had saved"
    assert sys.executable in (run_dir / "launch" / "job.sh").read_text()


HOSTS_OF_THEIR_OWN = """\
#!/bin/sh
# Runs the command on this machine as a host with a home and a health of its own.
export HOME={homes}/$1 LMWORKS_MACHINE=recorded={homes}/$1/machine
exec sh -c "$2"
"""


@pytest.mark.slow
def test_spares_replace_a_sick_host_and_one_that_is_lost(tmp_path: Path) -> None:
    """n2 is sick from the start, n3 takes its place; then n1 is lost with its agent, and n5 takes its place, since n4 is sick too."""
    run_dir, ssh, homes = tmp_path / "run", tmp_path / "ssh", tmp_path / "homes"
    ssh.write_text(HOSTS_OF_THEIR_OWN.format(homes=homes))
    ssh.chmod(0o755)
    for name in ("n1", "n2", "n3", "n4", "n5"):
        record(homes / name / "machine", homes)
    (homes / "n2" / "machine" / "sys/devices/system/edac/mc/mc0/ue_count").write_text("2")
    (homes / "n4" / "machine" / "clock_offset").write_text("-300")
    recipe = prepare(run_dir, timeout="20 s", ssh=str(ssh))
    hosts = [Host(f"n{number}", 1) for number in range(1, 6)]
    launch = toy(launcher.launch_on_hosts(recipe, run_dir, hosts, None, [str(run_dir), "400"], "127.0.0.1", spares=3))
    thread, codes = in_background(launch.run)
    wait_for(lambda: len(events(run_dir, "step")) > 20)
    victim = next(beat for beat in read_local_beats(LaunchDir.of(run_dir).heartbeats) if beat.host == "n1")
    agent = psutil.Process(victim.pid).ppid()
    os.kill(agent, signal.SIGKILL)
    os.kill(victim.pid, signal.SIGKILL)
    thread.join(PATIENCE)
    assert codes == [0]
    require_every_step(run_dir, 400)
    assert {event["ranks"] for event in events(run_dir, "step")} == {2}, "always at full size"
    started = [(event["host"], event["instead_of"]) for event in events(run_dir, "host_started")]
    assert started == [("n3", "n2"), ("n5", "n1")]
    excluded = {event["host"]: event["reason"] for event in events(run_dir, "host_excluded")}
    assert set(excluded) == {"n1", "n2", "n4"} and "its agent" in excluded["n1"]
    assert excluded["n2"] == "its health check failed: memory errors: 2 uncorrected and 0 corrected errors of 4 memory controllers"
    assert "behind that of the launcher" in excluded["n4"]
    beats = {event["hosts"][0] for event in events(run_dir, "restart")}
    assert beats == {"n1"}
