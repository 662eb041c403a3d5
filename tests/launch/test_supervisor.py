"""The supervisor with shells for agents: which hosts are excluded and come back, and what a launch ends with."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lmworks.errors import UserError
from lmworks.io.files import write_json
from lmworks.launch import supervisor
from lmworks.launch.launch_dir import LaunchDir
from lmworks.launch.supervisor import Supervisor
from lmworks.launch.torchrun import Host, HostTable
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import Ledger, events_of
from patience import PATIENCE

# Goes on until the launch is over, or as an agent does, until its pipe is closed.
AGENT = "while [ ! -e over ]; do read -t 0.05 line; [ $? -gt 128 ] || exit 0; done"


class Launch:
    """A supervisor over such agents, in a thread where nothing else is said."""

    def __init__(
        self, run_dir: Path, hosts: str, least: int, after: int = 2, agents: dict[str, str] | None = None, spares: int = 0, sick: str = ""
    ) -> None:
        run_dir.mkdir()
        self.run_dir, self.folder, self.started = run_dir, LaunchDir.of(run_dir), list[str]()
        self.agents = agents or {}
        self.folder.begin()
        self.table = HostTable(self.folder.hosts, [Host(name, 1) for name in hosts])
        self.size, self.sick, self.checked = len(hosts) - spares, set(sick), list[str]()
        self.supervisor = Supervisor(
            self.folder, run_dir, self.table, least, after, self._start, self.size, self._check, self._prepare if spares else None
        )
        self.ended: list[int | UserError] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _start(self, host: Host) -> list[str]:
        self.started.append(host.name)
        return ["bash", "-c", f"cd {self.run_dir}; {self.agents.get(host.name, AGENT)}"]

    def _check(self, hosts: Sequence[Host]) -> dict[str, list[str]]:
        self.checked.append("".join(host.name for host in hosts))
        return {host.name: ["GPU memory errors: GPU 3"] if host.name in self.sick else [] for host in hosts}

    def _prepare(self, host: Host) -> list[str]:
        return ["bash", "-c", f"cd {self.run_dir}; touch {host.name}.begun; read line; touch {host.name}.ended"]

    def _run(self) -> None:
        try:
            self.ended.append(self.supervisor.run())
        except UserError as error:
            self.ended.append(error)

    def run_now(self) -> int | UserError:
        self._run()
        return self.ended[0]

    def begin(self) -> None:
        self._thread.start()
        wait_for(lambda: len(self.started) == self.size)

    def fails(self, *hosts: str) -> None:
        """The ranks of these hosts end and are started again; returns when the supervisor has seen it."""
        with Ledger(self.run_dir / "ledger.jsonl") as ledger:
            ledger.write("restart", hosts=list(hosts), reason="it broke")
        seen = self.supervisor._restarts_seen + 1
        wait_for(lambda: self.supervisor._restarts_seen == seen)

    @property
    def active(self) -> str:
        return "".join(host.name for host in self.table.active())

    def end(self) -> int | UserError:
        (self.run_dir / "over").touch()
        self._thread.join(PATIENCE)
        return self.ended[0]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_POLL_INTERVAL", 0.02)
    monkeypatch.setattr(supervisor, "_OUTCOME_SECONDS", 0.1)


def test_a_host_that_fails_again_and_again_is_excluded_while_enough_are_left_and_comes_back(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", "abc", least=2)
    launch.begin()
    for hosts in ("a", "b", "a", "ab"):  # never twice in a row the ranks of one host alone
        launch.fails(*hosts)
    launch.fails("a")
    assert launch.active == "abc"
    launch.fails("a")
    wait_for(lambda: launch.active == "bc")
    (out,) = (host for host in launch.table.all() if host.excluded)
    assert out.excluded == "its ranks alone caused the last 2 failures, most recently: it broke"
    launch.fails("b")
    launch.fails("b")
    launch.fails("b")
    assert launch.active == "bc", "two are needed"
    launch.folder.readmit("a")
    wait_for(lambda: launch.active == "abc")
    wait_for(lambda: launch.started == [*"abca"])
    launch.folder.conclude(0, 0)
    assert launch.end() == 0


def test_failures_before_the_launch_and_before_a_readmission_are_not_counted(tmp_path: Path) -> None:
    """Two were reported in an earlier launch, and a third one was left for this launch to report."""
    launch = Launch(tmp_path / "run", "abc", least=1)
    with Ledger(launch.run_dir / "ledger.jsonl") as ledger:
        for _ in range(2):
            ledger.write("restart", hosts=["b"], reason="it broke")
    left = Heartbeat(launch.folder.heartbeats)
    left.share()
    left.end("failed")
    launch.begin()
    launch.fails("b")  # that of the earlier launch
    launch.fails("b")
    launch.fails("a")  # so that what the one before led to has been done
    assert launch.active == "abc"
    launch.fails("b")
    launch.fails("b")
    wait_for(lambda: launch.active == "ac")
    launch.folder.readmit("b")
    wait_for(lambda: launch.started == [*"abcb"])
    launch.fails("b")
    launch.fails("ab")
    assert launch.active == "abc"
    launch.folder.conclude(0, 0)
    assert launch.end() == 0


def test_ranks_leave_their_group_when_a_host_of_it_is_taken_away(tmp_path: Path) -> None:
    """Told before the agent ends: they would wait for the ranks of that host."""
    launch = Launch(tmp_path / "run", "ab", least=1, after=1, agents={"b": "read line; cp launch/failed told"})
    launch.begin()
    assert not launch.folder.is_group_given_up()
    launch.fails("b")
    wait_for(lambda: launch.active == "a")
    assert (launch.run_dir / "told").exists() and launch.folder.is_group_given_up()
    assert "its ranks alone caused the last failure" in str([host.excluded for host in launch.table.all()])
    launch.folder.conclude(0, 0)
    assert launch.end() == 0


def test_agents_that_stay_after_the_outcome_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that waits for another agent which never comes. Who asks for a host then gets it in the next launch."""
    monkeypatch.setattr(supervisor, "_LEAVE_SECONDS", 0.2)
    launch = Launch(tmp_path / "run", "ab", least=2)
    launch.begin()
    launch.folder.conclude(0, 0)
    launch.folder.readmit("b")
    launch._thread.join(PATIENCE / 4)
    assert launch.ended == [0] and launch.active == "ab"
    assert launch.folder.take_readmissions() == ["b"]


def ended_by(launch: Launch, interrupt: Callable[[], None]) -> int:
    """The exit code of a launch whose agents stay until it ends them, on what `interrupt` sends to this process."""
    over = threading.Event()

    def act() -> None:
        wait_for(lambda: len(launch.started) == 2)
        interrupt()
        if not over.wait(PATIENCE / 4):
            (launch.run_dir / "over").touch()

    threading.Thread(target=act, daemon=True).start()
    code = launch.supervisor.run()
    over.set()
    assert not (launch.run_dir / "over").exists(), "the agents had to end by themselves"
    return code


def test_ctrl_c_after_the_outcome_ends_agents_that_stay(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", "ab", least=1)

    def interrupt() -> None:
        launch.folder.conclude(0, 0)
        os.kill(os.getpid(), signal.SIGINT)

    assert ended_by(launch, interrupt) == 0


def test_a_host_whose_agent_dies_is_excluded_with_the_code(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", "ab", least=1, agents={"b": "exit 3"})
    launch.begin()
    wait_for(lambda: launch.active == "a")
    assert "its agent exited with code 3" in str([host.excluded for host in launch.table.all()])
    launch.folder.conclude(75, 0)
    assert launch.end() == 75
    too_few = Launch(tmp_path / "other", "ab", least=2, agents={"b": "exit 3"})
    too_few.begin()
    assert "1 hosts are left, and at least 2 are needed" in str(too_few.end())


def test_agents_that_leave_without_an_outcome_are_no_success(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", "ab", least=1)
    launch.begin()
    assert "0 hosts are left" in str(error := launch.end()) and "b: its agent exited with code 0, and the run is not over" in str(error)


def test_a_host_that_is_lost_without_a_failure_is_replaced(tmp_path: Path) -> None:
    """srun ends with code 0 when Slurm has taken the node down."""
    launch = Launch(tmp_path / "run", "abc", least=2, spares=1, agents={"b": "exit 0"})
    launch.begin()
    wait_for(lambda: launch.started == [*"abc"])
    assert launch.active == "ac"
    launch.folder.conclude(0, 0)
    assert launch.end() == 0


def test_an_agent_may_end_a_moment_before_the_outcome_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_OUTCOME_SECONDS", PATIENCE)
    launch = Launch(tmp_path / "run", "abc", least=2, spares=1, agents={"b": "exit 0"})
    launch.begin()
    wait_for(lambda: "b" in launch.supervisor._done)
    launch.folder.conclude(0, 0)
    assert launch.end() == 0 and launch.active == "abc" and launch.started == [*"ab"]


def test_a_second_ctrl_c_ends_agents_that_do_not_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_SAME_REQUEST", 0.1)
    launch = Launch(tmp_path / "run", "ab", least=1)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: launch.folder.stop_signal() == signal.SIGINT)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    assert ended_by(launch, interrupt) == 130


def host_events(launch: Launch) -> list[tuple[str, str]]:
    """Host and cause or predecessor of each event about hosts."""
    found = [*events_of(launch.run_dir, "host_excluded"), *events_of(launch.run_dir, "host_started")]
    return [(event["host"], event.get("instead_of") or event["reason"]) for event in found]


def test_a_spare_takes_the_place_of_a_host_that_fails(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", "abcd", least=3, spares=1)
    launch.begin()
    assert launch.started == [*"abc"]
    wait_for((launch.run_dir / "d.begun").exists)
    write_json(launch.folder.spares / "d.json", {"steps": [40, 48]})
    launch.fails("b")
    launch.fails("b")
    wait_for(lambda: launch.started == [*"abcd"])
    assert (launch.run_dir / "d.ended").exists() and launch.active == "acd"
    launch.folder.readmit("b")
    wait_for(lambda: launch.checked == ["abcd", "d", "b"])
    wait_for((launch.run_dir / "b.begun").exists)
    assert launch.started == [*"abcd"], "all places are taken, so it is a spare now"
    launch.fails("c")
    launch.fails("c")
    wait_for(lambda: launch.started == [*"abcdb"])
    launch.folder.conclude(0, 0)
    assert launch.end() == 0
    (first, _) = events_of(launch.run_dir, "host_started")
    assert (first["host"], first["instead_of"], first["cached"]) == ("d", "b", [40, 48])
    assert [host for host, _ in host_events(launch)] == [*"bcdb"]


def test_one_of_two_spares_takes_the_place_of_one_host(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", "abcde", least=3, spares=2)
    launch.begin()
    wait_for((launch.run_dir / "e.begun").exists)
    launch.fails("b")
    launch.fails("b")
    wait_for(lambda: "d" in launch.started)
    launch.folder.conclude(0, 0)
    assert launch.end() == 0
    assert launch.started == [*"abcd"] and len(events_of(launch.run_dir, "host_started")) == 1


def test_hosts_and_spares_that_are_sick_run_nothing(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", "abcde", least=2, spares=2, sick="bd")
    launch.begin()
    wait_for(lambda: launch.started == [*"ace"])
    assert launch.checked == ["abcde"], "what was checked just now is not checked again"
    (b, d) = (host for host in launch.table.all() if host.excluded)
    assert (b.name, d.name) == ("b", "d") and b.excluded == "its health check failed: GPU memory errors: GPU 3"
    launch.folder.readmit("b")
    wait_for(lambda: launch.checked[-1] == "b" and launch.active == "ace")
    launch.sick.clear()
    launch.folder.readmit("b")
    wait_for(lambda: launch.active == "abce")
    launch.sick.add("b")
    launch.fails("a")
    launch.fails("a")
    wait_for(lambda: launch.active == "ce")
    assert launch.started == [*"ace"], "the spare has become sick since, and two hosts are enough"
    Ledger(launch.run_dir / "ledger.jsonl").close()
    launch.folder.conclude(0, 0)
    assert launch.end() == 0
    assert sorted(host for host, _ in host_events(launch)) == [*"abbbde"], "a fails while b is checked again, in either order"


def test_too_many_sick_hosts_end_the_launch_before_it_begins(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", "abc", least=2, spares=1, sick="bc")
    assert "1 hosts are left, and at least 2 are needed (b: its health check failed" in str(launch.run_now())
    assert launch.started == [] and not (launch.run_dir / "ledger.jsonl").exists()


def test_agents_that_leave_because_a_job_is_preempted_exclude_no_host(tmp_path: Path) -> None:
    """The script of the job asks them to stop, and not this process; an agent may leave before the first rank has said so."""
    leaves = "while [ ! -e launch/stop ]; do read -t 0.05 line; done; exit 1"
    launch = Launch(tmp_path / "run", "abc", least=2, spares=1, agents={"b": leaves})
    launch.begin()
    launch.folder.request_stop(signal.SIGUSR1)
    wait_for(lambda: "b" not in launch.supervisor._agents)
    launch.folder.conclude(75, 0)
    assert launch.end() == 75
    assert launch.active == "abc" and launch.started == [*"ab"]


def test_ranks_that_exceed_their_limit_are_ended(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", "ab", least=2)
    launch.supervisor.limit = 0.1
    assert launch.run_now() == 1
    assert (launch.folder.outcome() or {})["message"] == "the ranks did not end within 0 s"


def test_a_closed_terminal_has_the_ranks_save_and_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless SIGHUP is ignored, as under nohup. The ranks are asked with SIGTERM, which nobody has them ignore."""
    launch, handlers = Launch(tmp_path / "run", "a", least=1, agents={"a": "exit 0"}), list[object]()
    start = launch.supervisor.start
    monkeypatch.setattr(launch.supervisor, "start", lambda host: handlers.append(signal.getsignal(signal.SIGHUP)) or start(host))
    before = signal.getsignal(signal.SIGHUP)
    launch.folder.conclude(75, 0)
    for ignored in (False, True):
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        try:
            assert launch.run_now() == 75
        finally:
            signal.signal(signal.SIGHUP, before)
    assert handlers == [launch.supervisor._receive, signal.SIG_IGN]
    launch.supervisor._receive(signal.SIGHUP, None)
    assert launch.folder.stop_signal() == signal.SIGTERM
