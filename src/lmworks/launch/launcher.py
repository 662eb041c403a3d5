"""A launch on this machine or on hosts: the number of ranks on each, the shell script that starts them, and their supervision.

The supervisor starts the agents, forwards stop requests, excludes hosts that fail, and readmits them.
"""

from __future__ import annotations

import os
import shlex
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
from lmworks.io.files import write_text
from lmworks.launch.agent import report_exits
from lmworks.launch.launch_dir import LaunchDir
from lmworks.launch.torchrun import Agent, CountRange, Host, HostTable, log_of, read_table
from lmworks.parallel.process_group import layout_for, min_world_size
from lmworks.recipe.schema.recipe import Recipe
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

    `exclude_after_failures`: number of failures in a row, caused by the ranks of one host, after which the host is excluded if
    enough hosts are left.
    """

    folder: LaunchDir
    run_dir: Path
    table: HostTable
    min_hosts: int
    exclude_after_failures: int
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
            report_exits(self.folder, self.run_dir)

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
        """Exclude a host whose ranks have failed `exclude_after_failures` times in a row."""
        restarts = self._restarts()
        if len(restarts) == self._restarts_seen or self._stop_time is not None:
            return
        self._restarts_seen = len(restarts)
        causes = [event.get("hosts", ()) for event in restarts]
        last = causes[-1][0] if len(causes[-1]) == 1 else None
        times = sum(1 for _ in takewhile(lambda hosts: list(hosts) == [last], reversed(causes)))
        if last in self._agents and times >= self.exclude_after_failures and len(self._agents) > self.min_hosts:
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


_LOOPBACK = "127.0.0.1"
_THIS_MACHINE = ("localhost", _LOOPBACK)


@dataclass(frozen=True)
class Launch:
    """`min_hosts`: hosts without which the run ends; `address`: where the agents reach this process; `arguments`: those of every rank;
    `ssh`: the ssh command, None for this machine."""

    recipe: Recipe
    run_dir: Path
    hosts: Sequence[Host]
    min_hosts: int
    address: str
    arguments: Sequence[str]
    ssh: str | None = None
    module: str = "lmworks.cli.rank"

    def agent(self, host: Host, port: int) -> Agent:
        loopback = _LOOPBACK if self.address == _LOOPBACK else None
        return Agent(
            LaunchDir.of(self.run_dir), CountRange(self.min_hosts, len(self.hosts)), host.slots, f"{self.address}:{port}", self.recipe.name,
            self.arguments, float(self.recipe.launch.grace_period), loopback, is_store_host=False, module=self.module,
            variables=self.recipe.launch.environment, ranks_here=self._ranks_here(host),
        )  # fmt: skip

    def _ranks_here(self, host: Host) -> tuple[int, int] | None:
        """Of a host that is one of several on its machine, the ranks of those before it, and of all."""

        def on_machine(name: str) -> str:
            return _LOOPBACK if self.ssh is None or name in _THIS_MACHINE else name

        names = [other.name for other in self.hosts if on_machine(other.name) == on_machine(host.name)]
        slots = [other.slots for other in self.hosts if other.name in names]
        return (sum(slots[: names.index(host.name)]), sum(slots)) if len(names) > 1 else None

    def script(self, host: Host, port: int) -> str:
        return self.agent(host, port).script(host.name, Path.cwd())

    def command(self, script: str, host: Host) -> list[str]:
        return ["sh", "-c", script] if self.ssh is None else [*shlex.split(self.ssh), host.name, script]

    def run(self) -> int:
        """Start the ranks, and restart them after failures; returns the exit code of the run."""
        folder, options = LaunchDir.of(self.run_dir), self.recipe.launch
        folder.begin()
        table = HostTable(folder.hosts, list(self.hosts))
        for name in folder.take_readmissions():
            table.readmit(name)
        with rendezvous_store(self.address) as port:

            def start(host: Host) -> list[str]:
                script = self.script(host, port)
                # overrides may contain credentials
                write_text(folder.path / f"{host.name.replace('/', '_')}.sh", script, private=True)
                return self.command(script, host)

            return Supervisor(folder, self.run_dir, table, self.min_hosts, options.exclude_after_failures, start).run()


def launch_local(recipe: Recipe, run_dir: Path, ranks: CountRange, arguments: Sequence[str]) -> Launch:
    """Launch ranks on this machine. A fixed number of ranks gets one agent; with a range, each agent has as few ranks as the layout
    allows."""
    for size in {ranks.minimum, ranks.maximum}:
        layout_for(recipe.layout, size)
    each = ranks.maximum if ranks.minimum == ranks.maximum else min_world_size(recipe.layout)
    hosts = [Host(f"local-{number}", each) for number in range(ranks.maximum // each)]
    # Entries excluded here were processes, not machines: a new launch uses all of them.
    LaunchDir.of(run_dir).hosts.unlink(missing_ok=True)
    return Launch(recipe, run_dir, hosts, ranks.minimum // each, _LOOPBACK, arguments)


def launch_on_hosts(
    recipe: Recipe, run_dir: Path, hosts: Sequence[Host], min_hosts: int | None, arguments: Sequence[str], address: str | None
) -> Launch:
    """Launch `slots` ranks on each host. The run continues while at least `min_hosts` hosts (default: all) are active."""
    each = min_world_size(recipe.layout)
    for host in hosts:
        if host.slots % each:
            raise UserError(
                f"{host.name} has {host.slots} slots, but the layout needs a multiple of {each} ranks, also after another host has failed; "
                f"give each host a multiple of {each} slots"
            )
    min_hosts = len(hosts) if min_hosts is None else min_hosts
    if not 0 < min_hosts <= len(hosts):
        raise UserError(f"--least {min_hosts} is not between 1 and the {len(hosts)} hosts of the file")
    here = all(host.name in _THIS_MACHINE for host in hosts)
    return Launch(recipe, run_dir, hosts, min_hosts, address or (_LOOPBACK if here else socket.getfqdn()), arguments, recipe.launch.ssh)


def readmit(run_dir: Path, name: str) -> None:
    """Readmit an excluded host; a running launch uses it at once. Raises `UserError` if there is no such host."""
    folder = LaunchDir.of(run_dir)
    excluded = [host.name for host in read_table(folder.hosts) if host.excluded]
    if name not in excluded:
        raise UserError(f"{name} is not excluded from {run_dir}; {'these are: ' + ', '.join(excluded) if excluded else 'no host is'}")
    folder.readmit(name)
