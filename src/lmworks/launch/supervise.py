"""Keeps the agents of a launch going: starts them, passes on a request to stop, excludes hosts that fail, takes them back."""

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
from lmworks.launch.folder import Folder
from lmworks.launch.hosts import Host, Table
from lmworks.launch.torchrun import log_of
from lmworks.progress import console
from lmworks.watch.ledger import read_ledger

_LOOK = 0.3  # seconds
_SAME = 1.0  # seconds within which a signal that comes again is the same request
_LAST_WORDS = 10.0  # seconds that an agent has to end its ranks at once
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def rendezvous_store(address: str) -> Iterator[int]:
    """The store where the agents meet, kept by this process, so that no agent is dearer than another; yields its port.

    It listens on `address` alone.
    """
    from torch.distributed import TCPStore

    with socket.create_server((address, 0)) as listener:
        port, fd = listener.getsockname()[1], os.dup(listener.fileno())
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        yield store.port
        del store


@dataclass
class Supervisor:
    """`start(host)` is the command of a host's agent. The run goes on while `least` hosts take part.

    `exclude_after`: failures in a row by the ranks of one host after which it is excluded, if the others suffice.
    """

    folder: Folder
    run_dir: Path
    table: Table
    least: int
    exclude_after: int
    start: Callable[[Host], Sequence[str]]
    _agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _asked: float | None = None
    _forced: bool = False
    _judged: int = 0

    def run(self) -> int:
        """Until the run is over; returns its exit code. Raises `UserError` if too few hosts are left."""
        self._judged = len(self._restarts())
        self._require_enough()
        caught = _SIGNALS if threading.current_thread() is threading.main_thread() else ()  # Python catches none elsewhere
        before = {number: signal.signal(number, self._receive) for number in caught}
        try:
            for host in self.table.taking_part():
                self._begin(host)
            while self._agents:
                time.sleep(_LOOK)
                self._collect()
                self._judge()
                self._readmit()
            return self._code()
        finally:
            self._end(list(self._agents))
            for number, handler in before.items():
                signal.signal(number, handler)

    def _begin(self, host: Host) -> None:
        # Sessions of their own: Ctrl-C reaches this process alone, and the ranks once, through the folder. The pipe tells them of our end.
        self._agents[host.name] = subprocess.Popen(self.start(host), stdin=subprocess.PIPE, start_new_session=True)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            self.folder.ask_to_stop(signal.Signals(number))
        elif number == signal.SIGINT and now - self._asked > _SAME:
            self._forced = True

    def _collect(self) -> None:
        """Agents that have ended: for good, or as a host that has failed."""
        if self._forced:
            self._end(list(self._agents))
            return
        for name, agent in list(self._agents.items()):
            code = agent.poll()
            if code is None:
                continue
            self._forget(name)
            if code and self._asked is None and self.folder.outcome() is None:
                self._exclude(name, self._why(name, code))

    def _judge(self) -> None:
        """A host whose ranks have failed time and again is not given another try."""
        restarts = self._restarts()
        if len(restarts) == self._judged or self._asked is not None:
            return
        self._judged = len(restarts)
        hosts = [event.get("hosts", ()) for event in restarts]
        last = hosts[-1][0] if len(hosts[-1]) == 1 else None
        times = sum(1 for _ in takewhile(lambda one: list(one) == [last], reversed(hosts)))
        if last in self._agents and times >= self.exclude_after and len(self._agents) > self.least:
            self._end([str(last)])
            self._exclude(str(last), f"its ranks failed {times} times in a row; at last: {restarts[-1].get('reason')}")

    def _readmit(self) -> None:
        for name in self.folder.readmitted():
            if self._asked is None and self.table.readmit(name):
                console.print(f"{name} takes part again", style="yellow")
                self._begin(next(host for host in self.table.all() if host.name == name))

    def _exclude(self, name: str, reason: str) -> None:
        self.table.exclude(name, reason)
        if len(self.table.all()) > 1:
            console.print(f"{name} is excluded: {reason}; take it back with: lmworks launch readmit {self.run_dir} {name}", style="yellow")
        self._require_enough()

    def _require_enough(self) -> None:
        left = self.table.taking_part()
        if len(left) < self.least:
            out = "; ".join(f"{host.name}: {host.excluded}" for host in self.table.all() if host.excluded)
            if len(self.table.all()) == 1:
                raise UserError(f"the ranks could not be kept going: {out}")
            raise UserError(
                f"{len(left)} of at least {self.least} hosts are left ({out}); mend them and take each back with: "
                f"lmworks launch readmit {self.run_dir} HOST"
            )

    def _why(self, name: str, code: int) -> str:
        log = log_of(self.folder, name)
        what = f"its agent was ended by {signal.Signals(-code).name}" if code < 0 else f"its agent ended with code {code}"
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()] if log.exists() else []
        return f"{what} (see {log}{': ' + lines[-1].strip()[:200] if lines else ''})"

    def _restarts(self) -> list[dict[str, Any]]:
        return [event for event in read_ledger(self.run_dir / "ledger.jsonl") if event["event"] == "restart"]

    def _forget(self, name: str) -> None:
        """Close the pipe that keeps an agent alive."""
        agent = self._agents.pop(name)
        if agent.stdin:
            agent.stdin.close()

    def _end(self, names: Sequence[str]) -> None:
        """End agents and their ranks, at once."""
        ending = {name: self._agents[name] for name in names}
        for name in ending:
            self._forget(name)
        deadline = time.monotonic() + _LAST_WORDS
        for agent in ending.values():
            try:
                agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()

    def _code(self) -> int:
        outcome = self.folder.outcome()
        if outcome is None:
            return 130 if self._asked is not None else 1
        if outcome["message"]:
            console.print(outcome["message"])
        if outcome["rank"]:
            console.print(f"rank {outcome['rank']} ended the run; see {self.folder.logs}/rank-{outcome['rank']}.log")
        return int(outcome["code"])

