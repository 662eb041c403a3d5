"""A launch on this machine or on hosts: the number of ranks on each, and the shell script that starts them."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmworks.errors import UserError
from lmworks.io.files import write_text
from lmworks.launch.launch_dir import LaunchDir
from lmworks.launch.supervise import Supervisor, rendezvous_store
from lmworks.launch.torchrun import Agent, CountRange, Host, HostTable, read_table
from lmworks.parallel.process_group import layout_for, min_world_size
from lmworks.recipe.schema.recipe import Recipe

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

            return Supervisor(folder, self.run_dir, table, self.min_hosts, options.exclude_after, start).run()


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
