"""Supervises the agents of a launch: starts them, forwards stop requests, excludes hosts that fail, and readmits them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from lmworks.errors import UserError
from lmworks.launch.launch_dir import LaunchDir
from lmworks.launch.torchrun import Host, HostTable, log_of
from lmworks.ui.terminal import console
from lmworks.watch.ledger import LEDGER, read_ledger

_POLL_INTERVAL = 0.3  # seconds
_SAME_REQUEST = 1.0  # seconds within which a repeated signal counts as the same request
_EXIT_SECONDS = 10.0  # that an agent has to kill its ranks
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def rendezvous_store(address: str) -> Iterator[int]:
    """The rendezvous store of the agents; yields its port. This process hosts it, so that the loss of any agent can be survived.

    It listens on `address` only.
    """
    from torch.distributed import TCPStore

    with socket.create_server((address, 0)) as listener:
        port, fd = listener.getsockname()[1], os.dup(listener.fileno())
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        yield store.port
        del store


@dataclass
class Supervisor:
    """`start(host)` returns the command of a host's agent. The run continues while at least `min_hosts` hosts are active.

    `exclude_after`: number of failures in a row, caused by the ranks of one host, after which the host is excluded if enough hosts are
    left.
    """

    folder: LaunchDir
    run_dir: Path
    table: HostTable
    min_hosts: int
    exclude_after: int
    start: Callable[[Host], Sequence[str]]
    _agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _stop_time: float | None = None
    _forced: bool = False
    _restarts_seen: int = 0

    def run(self) -> int:
        """Supervise until the run is over; returns its exit code. Raises `UserError` if too few hosts are left."""
        self._restarts_seen = len(self._restarts())
        self._require_enough()
        caught = _SIGNALS if threading.current_thread() is threading.main_thread() else ()  # Python allows handlers only there
        before = {number: signal.signal(number, self._receive) for number in caught}
        try:
            for host in self.table.active():
                self._start_agent(host)
            while self._agents:
                time.sleep(_POLL_INTERVAL)
                self._collect()
                self._exclude_failing()
                self._readmit()
            return self._exit_code()
        finally:
            self._end(list(self._agents))
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start_agent(self, host: Host) -> None:
        # In a session of its own: Ctrl-C reaches only this process, and the ranks once, through the launch directory. When this process
        # dies, the pipe closes and the agent ends.
        self._agents[host.name] = subprocess.Popen(self.start(host), stdin=subprocess.PIPE, start_new_session=True)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._stop_time is None:
            self._stop_time = now
            self.folder.request_stop(signal.Signals(number))
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
            self._forget(name)
            if code and self._stop_time is None and self.folder.outcome() is None:
                self._exclude(name, self._agent_failure(name, code))

    def _exclude_failing(self) -> None:
        """Exclude a host whose ranks have failed `exclude_after` times in a row."""
        restarts = self._restarts()
        if len(restarts) == self._restarts_seen or self._stop_time is not None:
            return
        self._restarts_seen = len(restarts)
        causes = [event.get("hosts", ()) for event in restarts]
        last = causes[-1][0] if len(causes[-1]) == 1 else None
        times = sum(1 for _ in takewhile(lambda hosts: list(hosts) == [last], reversed(causes)))
        if last in self._agents and times >= self.exclude_after and len(self._agents) > self.min_hosts:
            self._end([str(last)])
            self._exclude(str(last), f"its ranks failed {times} times in a row, most recently: {restarts[-1].get('reason')}")

    def _readmit(self) -> None:
        for name in self.folder.take_readmissions():
            if self._stop_time is None and self.table.readmit(name):
                console.print(f"{name} is readmitted", style="yellow")
                self._start_agent(next(host for host in self.table.all() if host.name == name))

    def _exclude(self, name: str, reason: str) -> None:
        self.table.exclude(name, reason)
        if len(self.table.all()) > 1:
            console.print(f"{name} is excluded: {reason}; readmit it with: lmworks launch readmit {self.run_dir} {name}", style="yellow")
        self._require_enough()

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
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()] if log.exists() else []
        return f"{how} (see {log}{': ' + lines[-1].strip()[:200] if lines else ''})"

    def _restarts(self) -> list[dict[str, Any]]:
        return [event for event in read_ledger(self.run_dir / LEDGER) if event["event"] == "restart"]

    def _forget(self, name: str) -> None:
        """Close the pipe that keeps an agent alive."""
        agent = self._agents.pop(name)
        if agent.stdin:
            agent.stdin.close()

    def _end(self, names: Sequence[str]) -> None:
        """Stop agents, which kill their ranks."""
        ending = {name: self._agents[name] for name in names}
        for name in ending:
            self._forget(name)
        deadline = time.monotonic() + _EXIT_SECONDS
        for agent in ending.values():
            try:
                agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()

    def _exit_code(self) -> int:
        outcome = self.folder.outcome()
        if outcome is None:
            return 130 if self._stop_time is not None else 1
        if outcome["message"]:
            console.print(outcome["message"])
        if outcome["rank"]:
            console.print(f"rank {outcome['rank']} ended the run; see {self.folder.logs}/rank-{outcome['rank']}.log")
        return int(outcome["code"])

