"""A launch on this machine or on hosts: the number of ranks on each, the shell script that starts them, and the check of the hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lmworks.errors import UserError
from lmworks.health.report import Report
from lmworks.io.files import write_text
from lmworks.launch.host_health import HostChecker, compare
from lmworks.launch.launch_dir import LaunchDir, file_name, reason_of_end
from lmworks.launch.launch_lock import lock_launch
from lmworks.launch.supervisor import Supervisor
from lmworks.launch.torchrun import Agent, CountRange, Host, HostTable, command_on, read_table
from lmworks.recipe.schema.layout import layout_for, min_world_size
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.terminal import console
from lmworks.watch.alerting import alerting
from lmworks.watch.run_end import RunEnd


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


_RANKS_END = 30.0  # seconds beyond the grace period, within which the ranks of a launcher that was killed are gone
_LOOPBACK = "127.0.0.1"
_THIS_MACHINE = ("localhost", _LOOPBACK)


MEASUREMENTS = ("preflight", "profile")  # commands of ranks that change nothing in the run, whose end their end is not


def last_stage(arguments: Sequence[str]) -> str | None:
    """The stage with which the command of the ranks ends, or one of `MEASUREMENTS`; None if it is the last of the recipe."""
    return None if arguments[:1] in ([], ["run"]) else arguments[0]


@dataclass(frozen=True)
class Launch:
    """`min_hosts`: hosts without which the run ends; `address`: where the agents reach this process; `arguments`: those of every rank;
    `ssh`: the ssh command, None for this machine; `spares`: hosts at the end that run ranks only after another has failed; `limit`: seconds
    after which the ranks are ended."""

    recipe: Recipe
    run_dir: Path
    hosts: Sequence[Host]
    min_hosts: int
    address: str
    arguments: Sequence[str]
    ssh: str | None = None
    module: str = "lmworks.cli.rank"
    spares: int = 0
    limit: float = float("inf")

    @property
    def size(self) -> int:
        """Hosts that run ranks at the same time."""
        return len(self.hosts) - self.spares

    def agent(self, host: Host, port: int) -> Agent:
        loopback = _LOOPBACK if self.address == _LOOPBACK else None
        return Agent(
            LaunchDir.of(self.run_dir), CountRange(self.min_hosts, self.size), host.slots, f"{self.address}:{port}", self.recipe.name,
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
        return command_on(host, script, self.ssh)

    def run(self) -> int:
        """Start the ranks, and restart them after failures; returns the exit code of the run. Raises `UserError` first if the run is in
        use."""
        with lock_launch(self.run_dir, float(self.recipe.launch.grace_period) + _RANKS_END):
            to = last_stage(self.arguments)
            return self.supervise() if to in MEASUREMENTS else self._run(to)

    def _run(self, to: str | None) -> int:
        with alerting(self.recipe, self.run_dir, owner=True):
            try:
                code = self.supervise()
            except BaseException as error:
                RunEnd.of_error(error).record(self.run_dir, to)
                raise
            RunEnd.of_code(code, reason_of_end(self.run_dir)).record(self.run_dir, to)
        return code

    def supervise(self) -> int:
        """Like `run`, but the caller holds the lock, and how the run ends is left to it to record."""
        folder, options = LaunchDir.of(self.run_dir), self.recipe.launch
        folder.begin()
        if self.ssh is None:  # entries excluded by an earlier launch were processes, not machines
            folder.hosts.unlink(missing_ok=True)
        table = HostTable(folder.hosts, list(self.hosts))
        for name in folder.take_readmissions():
            table.readmit(name)
        with rendezvous_store(self.address) as port:

            def start(host: Host) -> list[str]:
                return self._started_as(host, self.script(host, port), "")

            def prepare(host: Host) -> list[str]:
                return self._started_as(host, self.agent(host, port).cache_script(host.name, Path.cwd(), self.run_dir), ".cache")

            checks = options.health_check and self.ssh is not None
            checker = HostChecker(self.command, self.run_dir, (f"{self.address}:{port}",))
            return Supervisor(
                folder, self.run_dir, table, self.min_hosts, options.exclude_after_failures, start, self.size,
                _failures_by(checker) if checks else None, prepare if self.recipe.shards.cache is not None else None, self.limit,
            ).run()  # fmt: skip

    def _started_as(self, host: Host, script: str, ending: str) -> list[str]:
        """The command that runs a script on a host; the script is kept in the launch directory."""
        # overrides may contain credentials
        write_text(LaunchDir.of(self.run_dir).path / f"{file_name(host.name)}{ending}.sh", script, private=True)
        return self.command(script, host)


def _failures_by(checker: HostChecker) -> Callable[[Sequence[Host]], Mapping[str, Sequence[str]]]:
    """Checks hosts, also beside those that were checked before; prints what could not be judged."""
    known: dict[str, Report] = {}

    def check(hosts: Sequence[Host]) -> Mapping[str, Sequence[str]]:
        console.print(f"checking {', '.join(host.name for host in hosts[:8])}{' and others' if len(hosts) > 8 else ''}")
        known.update(checker.check(hosts))
        reports = compare(known)
        for host in hosts:
            for checked in reports[host.name].checks:
                if checked.result.status in ("warn", "unknown"):
                    console.print(f"{host.name}: {checked.title}: {checked.result.text}", style="yellow")
        return {host.name: reports[host.name].failures for host in hosts}

    return check


def launch_local(recipe: Recipe, run_dir: Path, ranks: CountRange, arguments: Sequence[str]) -> Launch:
    """Launch ranks on this machine. A fixed number of ranks gets one agent; with a range, each agent has as few ranks as the layout
    allows."""
    for size in {ranks.minimum, ranks.maximum}:
        layout_for(recipe.layout, size)
    each = ranks.maximum if ranks.minimum == ranks.maximum else min_world_size(recipe.layout)
    hosts = [Host(f"local-{number}", each) for number in range(ranks.maximum // each)]
    return Launch(recipe, run_dir, hosts, ranks.minimum // each, _LOOPBACK, arguments)


def launch_on_hosts(
    recipe: Recipe, run_dir: Path, hosts: Sequence[Host], min_hosts: int | None, arguments: Sequence[str], address: str | None,
    spares: int = 0,
) -> Launch:  # fmt: skip
    """Launch `slots` ranks on each host but the last `spares`, which replace hosts that fail. The run continues while at least `min_hosts`
    hosts (default: all that are no spares) are active."""
    each = min_world_size(recipe.layout)
    for host in hosts:
        if host.slots % each:
            raise UserError(
                f"{host.name} has {host.slots} slots, but the layout needs a multiple of {each} ranks, also after another host has failed; "
                f"give each host a multiple of {each} slots"
            )
    size = len(hosts) - spares
    if not 0 <= spares < len(hosts):
        raise UserError(f"--spares {spares} leaves none of the {len(hosts)} hosts of the file to run on; list more hosts")
    if other := [host for host in hosts[size:] if host.slots != hosts[0].slots or any(host.slots != one.slots for one in hosts[:size])]:
        raise UserError(f"{other[0].name} is a spare with {other[0].slots} slots, so all hosts need as many; change the host file")
    min_hosts = size if min_hosts is None else min_hosts
    if not 0 < min_hosts <= size:
        which = "that are no spares" if spares else "of the file"
        raise UserError(f"--least {min_hosts} is not between 1 and the {size} hosts {which}")
    here = all(host.name in _THIS_MACHINE for host in hosts)
    address = address or (_LOOPBACK if here else socket.getfqdn())
    return Launch(recipe, run_dir, hosts, min_hosts, address, arguments, recipe.launch.ssh, spares=spares)


def readmit(run_dir: Path, name: str) -> None:
    """Readmit an excluded host; a running launch uses it at once. Raises `UserError` if there is no such host."""
    folder = LaunchDir.of(run_dir)
    excluded = [host.name for host in read_table(folder.hosts) if host.excluded]
    if name not in excluded:
        raise UserError(f"{name} is not excluded from {run_dir}; {'these are: ' + ', '.join(excluded) if excluded else 'no host is'}")
    folder.readmit(name)
