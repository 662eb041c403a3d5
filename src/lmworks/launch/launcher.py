"""A launch on this machine or on hosts: the number of ranks on each, and the shell script that starts them."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmworks.errors import UserError
from lmworks.files import write_text
from lmworks.launch.folder import Folder
from lmworks.launch.hosts import Host, Table, read_table
from lmworks.launch.supervise import Supervisor, rendezvous_store
from lmworks.launch.torchrun import Agent, CountRange
from lmworks.parallel.process_group import layout_for, min_world_size
from lmworks.recipe.schema.recipe import Recipe

_LOOPBACK = "127.0.0.1"
_THIS_MACHINE = ("localhost", _LOOPBACK)


@dataclass(frozen=True)
class Launch:
    """`least` is a number of places; `address` is where the agents find this process; `ssh` is None on this machine."""

    recipe: Recipe
    run_dir: Path
    hosts: Sequence[Host]
    least: int
    address: str
    work: Sequence[str]
    ssh: str | None = None
    module: str = "lmworks.cli.rank"

    def agent(self, host: Host, port: int) -> Agent:
        at_home = _LOOPBACK if self.address == _LOOPBACK else None
        return Agent(
            Folder.of(self.run_dir), CountRange(self.least, len(self.hosts)), host.slots, f"{self.address}:{port}", self.recipe.name,
            self.work, float(self.recipe.launch.grace_period), at_home, hosts_it=False, module=self.module,
        )  # fmt: skip

    def script(self, host: Host, port: int) -> str:
        return self.agent(host, port).script(host.name, Path.cwd())

    def command(self, script: str, host: Host) -> list[str]:
        return ["sh", "-c", script] if self.ssh is None else [*shlex.split(self.ssh), host.name, script]

    def run(self) -> int:
        """Start the ranks and keep them going; returns the exit code of the run."""
        folder, node = Folder.of(self.run_dir), self.recipe.launch
        folder.begin()
        table = Table(folder.hosts, list(self.hosts))
        for name in folder.readmitted():
            table.readmit(name)
        with rendezvous_store(self.address) as port:

            def start(host: Host) -> list[str]:
                script = self.script(host, port)
                # overrides may have credentials in them
                write_text(folder.path / f"{host.name.replace('/', '_')}.sh", script, private=True)
                return self.command(script, host)

            return Supervisor(folder, self.run_dir, table, self.least, node.exclude_after, start).run()


def launch_local(recipe: Recipe, run_dir: Path, ranks: CountRange, work: Sequence[str]) -> Launch:
    """Ranks of this machine. A fixed number has one agent; between two numbers each agent has as few ranks as the layout allows."""
    for size in {ranks.least, ranks.most}:
        layout_for(recipe.layout, size)
    each = ranks.most if ranks.least == ranks.most else min_world_size(recipe.layout)
    hosts = [Host(f"local-{number}", each) for number in range(ranks.most // each)]
    # What was excluded here was a process, not a machine: a new launch begins with all.
    Folder.of(run_dir).hosts.unlink(missing_ok=True)
    return Launch(recipe, run_dir, hosts, ranks.least // each, _LOOPBACK, work)


def launch_on_hosts(
    recipe: Recipe, run_dir: Path, hosts: Sequence[Host], least: int | None, work: Sequence[str], address: str | None
) -> Launch:
    """Ranks of the hosts, `slots` on each; the run goes on while `least` hosts (all, where left out) take part."""
    each = min_world_size(recipe.layout)
    for host in hosts:
        if host.slots % each:
            raise UserError(
                f"{host.name} has {host.slots} slots, but the layout comes in {each} ranks at a time, also when another host is gone; "
                f"give each host a multiple of {each} slots"
            )
    least = len(hosts) if least is None else least
    if not 0 < least <= len(hosts):
        raise UserError(f"--least {least} is not between 1 and the {len(hosts)} hosts of the file")
    here = all(host.name in _THIS_MACHINE for host in hosts)
    return Launch(recipe, run_dir, hosts, least, address or (_LOOPBACK if here else socket.getfqdn()), work, recipe.launch.ssh)


def readmit(run_dir: Path, name: str) -> None:
    """Take an excluded host back, at once where the run is under way. Raises `UserError` if there is no such host."""
    folder = Folder.of(run_dir)
    out = [host.name for host in read_table(folder.hosts) if host.excluded]
    if name not in out:
        raise UserError(f"{name} is not excluded from {run_dir}; {'these are: ' + ', '.join(out) if out else 'no host is'}")
    folder.readmit(name)
