"""The supervision of the agents of a launch: forwards stop requests, excludes hosts that fail, starts spare ones, and readmits hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from lmworks.errors import UserError
from lmworks.io.files import read_json
from lmworks.launch.agent import report_exits
from lmworks.launch.launch_dir import LaunchDir, file_name
from lmworks.launch.torchrun import Host, HostTable, log_of
from lmworks.ui.exit_codes import ExitCode
from lmworks.ui.terminal import console, leave_closed_terminal
from lmworks.watch.heartbeat import diagnose_failure, read_beats
from lmworks.watch.ledger import LEDGER, read_ledger
from lmworks.watch.stop_signals import stop_signals

_POLL_INTERVAL = 0.3  # seconds
_SAME_REQUEST = 1.0  # seconds within which a repeated signal counts as the same request
_EXIT_SECONDS = 10.0  # that an agent has to kill its ranks
_OUTCOME_SECONDS = 10.0  # after the end of an agent without a failure, within which the outcome of the run must be seen
# From the outcome on, after which the agents are ended: ranks exit by themselves within a minute, but an agent may wait for another one
# that does not come.
_LEAVE_SECONDS = 90.0


@dataclass
class Supervisor:
    """`start(host)` returns the command of a host's agent. The run continues while at least `min_hosts` hosts are active.

    `exclude_after_failures`: a host is excluded if its ranks alone have caused this many of the last failures (of this launch, and since
    the host was readmitted), and if enough hosts are left. `size`: hosts that run ranks at the same time, by default all; the others of
    the table are spares. `check` returns the failures of each host's health check. `prepare(host)` returns the command that a spare runs
    until it is needed. `limit`: seconds after which the ranks are ended.
    """

    folder: LaunchDir
    run_dir: Path
    table: HostTable
    min_hosts: int
    exclude_after_failures: int
    start: Callable[[Host], Sequence[str]]
    size: int | None = None
    check: Callable[[Sequence[Host]], Mapping[str, Sequence[str]]] | None = None
    prepare: Callable[[Host], Sequence[str]] | None = None
    limit: float = float("inf")
    _agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _preparing: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)  # hosts with a place among those that run ranks
    _vacant: list[str] = field(default_factory=list)  # excluded hosts whose place nobody has taken
    _done: dict[str, float] = field(default_factory=dict)  # when agents were first seen to have ended with code 0
    _stop_time: float | None = None
    _forced: bool = False
    _restarts_seen: int = 0
    _restarts_before: int = 0  # events that say nothing about this launch
    _restarts_forgiven: dict[str, int] = field(default_factory=dict)  # events before a host was readmitted

    def run(self) -> int:
        """Supervise until the run is over; returns its exit code. Raises `UserError` if too few hosts are left."""
        self._restarts_seen = self._restarts_before = len(self._restarts())
        if diagnose_failure(read_beats(self.folder.heartbeats)) is not None:
            self._restarts_before += 1  # an earlier launch has ended with a failure, which the first group is going to report
        self._require_enough()
        caught = stop_signals() if threading.current_thread() is threading.main_thread() else ()  # Python allows handlers only there
        before = {number: signal.signal(number, self._receive) for number in caught}
        try:
            places = self.table.active()[: self.size]
            self._check(self.table.active())
            if self._stop_time is not None:
                return self._exit_code()
            left = self.table.active()
            self._require_enough()
            for host in places:
                if host in left:
                    self._start_agent(host)
                else:
                    self._vacant.append(host.name)
            self._fill(checked=True)
            self._prepare_spares()
            until = time.monotonic() + self.limit
            while self._agents:
                time.sleep(_POLL_INTERVAL)
                if self.folder.outcome() is not None:
                    until = min(until, time.monotonic() + _LEAVE_SECONDS)
                if time.monotonic() > until:
                    if self.folder.outcome() is None:
                        self.folder.conclude(ExitCode.FAILED, 0, f"the ranks did not end within {self.limit:.0f} s")
                    self._end(list(self._agents))
                self._collect()
                self._exclude_failing()
                self._readmit()
                self._fill()
            return self._exit_code()
        finally:
            self._end(list(self._agents))
            self._stop_preparing(list(self._preparing))
            report_exits(self.folder, self.run_dir)
            if (self.run_dir / LEDGER).exists():  # else a rank records them
                self.folder.record_announcements(self.run_dir)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start_agent(self, host: Host) -> None:
        # In a session of its own: Ctrl-C reaches only this process, and the ranks once, through the launch directory. When this process
        # dies, the pipe closes and the agent ends.
        self._agents[host.name] = subprocess.Popen(self.start(host), stdin=subprocess.PIPE, start_new_session=True)
        self._started.add(host.name)

    def _is_ending(self) -> bool:
        """Whether the run is over, or somebody has asked it to stop: this process, or the script of a Slurm job."""
        return self._stop_time is not None or self.folder.stop_signal() is not None or self.folder.outcome() is not None

    def _spares(self) -> list[Host]:
        return [host for host in self.table.active() if host.name not in self._agents]

    def _check(self, hosts: Sequence[Host]) -> None:
        """Exclude those of these hosts whose health check fails."""
        if self.check is not None and hosts:
            for name, failures in self.check(hosts).items():
                if failures:
                    self._exclude(name, f"its health check failed: {'; '.join(failures)}")

    def _fill(self, checked: bool = False) -> None:
        """Start a healthy spare in place of each host that was excluded. Raises `UserError` if too few hosts are left."""
        while self._vacant and not self._is_ending() and (spares := self._spares()):
            host, lost = spares[0], self._vacant[0]
            self._stop_preparing([host.name])
            if not checked:
                self._check([host])
            if host in self._spares():
                self._vacant.pop(0)
                path = self.folder.spares / f"{file_name(host.name)}.json"
                cached = read_json(path)["steps"] if path.exists() else None
                console.print(f"{host.name} starts instead of {lost}", style="yellow")
                self.folder.announce("host_started", host=host.name, instead_of=lost, cached=cached)
                self._start_agent(host)
        self._require_enough()

    def _prepare_spares(self) -> None:
        if self.prepare is not None:
            for host in self._spares():
                if host.name in self._preparing:
                    continue
                self._preparing[host.name] = subprocess.Popen(self.prepare(host), stdin=subprocess.PIPE, start_new_session=True)

    def _stop_preparing(self, names: Sequence[str]) -> None:
        _stop([self._preparing.pop(name) for name in names if name in self._preparing])

    def _receive(self, number: int, frame: FrameType | None) -> None:
        leave_closed_terminal()
        now = time.monotonic()
        if number == signal.SIGINT and self.folder.outcome() is not None:
            self._forced = True  # the run is over, and there is nothing to save
        elif self._stop_time is None:
            # SIGHUP is of a terminal that the ranks do not have, and may be ignored by them.
            self._stop_time = now
            self.folder.request_stop(signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))
        elif number == signal.SIGINT and now - self._stop_time > _SAME_REQUEST:
            self._forced = True

    def _collect(self) -> None:
        """Handle agents that have exited, because the run is over or because their host has failed."""
        if self._forced:
            self._end(list(self._agents))
            return
        for name, agent in list(self._agents.items()):
            code = agent.poll()
            if code is None:
                continue
            now = time.monotonic()
            # Code 0: its ranks are done, and the first one is about to say so; or the command that reaches the host has lost it, as srun
            # does, which ends with 0 after "Node failure".
            if code == 0 and not self._is_ending() and now < self._done.setdefault(name, now) + _OUTCOME_SECONDS:
                continue
            self._done.pop(name, None)
            _close(self._agents.pop(name))
            if not self._is_ending():
                self._exclude(name, self._agent_failure(name, code))

    def _exclude_failing(self) -> None:
        """Exclude a host whose ranks alone have caused the last `exclude_after_failures` failures. The first rank has named the cause when
        the next group met, so this group is given up."""
        restarts = self._restarts()
        if len(restarts) == self._restarts_seen or self._is_ending():
            return
        self._restarts_seen = len(restarts)
        causes = [list(event.get("hosts", ())) for event in restarts]
        last = str(causes[-1][0]) if len(causes[-1]) == 1 else ""
        counted = causes[max(self._restarts_before, self._restarts_forgiven.get(last, 0)) :]
        times = sum(1 for _ in takewhile(lambda hosts: hosts == [last], reversed(counted)))
        enough = len(self._agents) + len(self._spares()) > self.min_hosts
        if last in self._agents and times >= self.exclude_after_failures and enough:
            # First: ranks that wait for those of this host would not notice that they are gone before a collective times out.
            self.folder.give_up_group()
            self._end([last])
            which = "the last failure" if times == 1 else f"the last {times} failures"
            self._exclude(last, f"its ranks alone caused {which}, most recently: {restarts[-1].get('reason')}")

    def _readmit(self) -> None:
        if self._is_ending():
            return  # the next launch takes what was asked for
        for name in self.folder.take_readmissions():
            if not self.table.readmit(name):
                continue
            self._restarts_forgiven[name] = len(self._restarts())
            host = next(host for host in self.table.all() if host.name == name)
            self._check([host])
            if host not in self.table.active():
                continue
            if len(self._agents) < (self.size or len(self.table.all())):
                console.print(f"{name} is readmitted", style="yellow")
                if self._vacant:
                    self._vacant.remove(name if name in self._vacant else self._vacant[0])
                self._start_agent(host)
            else:
                console.print(f"{name} is readmitted, as a spare", style="yellow")
                self._prepare_spares()

    def _exclude(self, name: str, reason: str) -> None:
        self.table.exclude(name, reason)
        if len(self.table.all()) > 1:
            console.print(f"{name} is excluded: {reason}; readmit it with: lmworks launch readmit {self.run_dir} {name}", style="yellow")
            self.folder.announce("host_excluded", host=name, reason=reason)
        if name in self._started:
            self._started.remove(name)
            self._vacant.append(name)

    def _require_enough(self) -> None:
        left = self.table.active()
        if len(left) < self.min_hosts:
            excluded = "; ".join(f"{host.name}: {host.excluded}" for host in self.table.all() if host.excluded)
            if len(self.table.all()) == 1:
                raise UserError(f"the ranks cannot be restarted: {excluded}")
            raise UserError(
                f"{len(left)} hosts are left, and at least {self.min_hosts} are needed ({excluded}); repair them and readmit each with: "
                f"lmworks launch readmit {self.run_dir} HOST"
            )

    def _agent_failure(self, name: str, code: int) -> str:
        log = log_of(self.folder, name)
        how = f"its agent was killed by {signal.Signals(-code).name}" if code < 0 else f"its agent exited with code {code}"
        how += "" if code else ", and the run is not over"
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()] if log.exists() else []
        return f"{how} (see {log}{': ' + lines[-1].strip()[:200] if lines else ''})"

    def _restarts(self) -> list[dict[str, Any]]:
        return [event for event in read_ledger(self.run_dir / LEDGER) if event["event"] == "restart"]

    def _end(self, names: Sequence[str]) -> None:
        """Stop agents, which kill their ranks."""
        _stop([self._agents.pop(name) for name in names])

    def _exit_code(self) -> int:
        outcome = self.folder.outcome()
        if outcome is None:
            return 130 if self._stop_time is not None else 1
        if outcome["message"]:
            console.print(outcome["message"])
        if outcome["rank"]:
            console.print(f"rank {outcome['rank']} ended the run; see {self.folder.logs}/rank-{outcome['rank']}.log")
        return int(outcome["code"])


def _close(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe that keeps an agent alive."""
    if process.stdin:
        process.stdin.close()


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _close(process)
    deadline = time.monotonic() + _EXIT_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
