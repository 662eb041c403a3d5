"""The command that starts the ranks of one node (this machine, a host, a Slurm node): a `torchrun` agent; and the hosts of a launch.

The hosts are those of the host file; a table has the active and the excluded ones.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lmworks.errors import UserError
from lmworks.host.machine import RANKS_HERE
from lmworks.io.files import open_regular, read_at_most, read_json, write_json
from lmworks.io.urls import reveal
from lmworks.launch.launch_dir import COMMAND, VARIABLE, LaunchDir, file_name
from lmworks.watch.heartbeat import HOST

_MOST = 1 << 26  # bytes of a host file: a million names
_LINE = re.compile(r"^(\S+?)(?:\s+slots\s*=\s*(\d+))?$")


@dataclass(frozen=True)
class Host:
    """A machine and the number of ranks that it can run. `excluded` is the reason why it is not used; `since` is the time (seconds since
    1970) of its exclusion, or of its last readmission."""

    name: str
    slots: int
    excluded: str | None = None
    since: float | None = None


def read_hosts(path: Path) -> list[Host]:
    """Read one host per line, `NAME slots=N` (default 1); # starts a comment. Raises `UserError` that names the line."""
    try:
        with open_regular(Path(path)) as handle:
            lines = read_at_most(handle, _MOST).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{path} is not a host file; write one host per line, such as: node-1 slots=8") from None
    return _parsed(lines, str(path))


def find_hosts(text: str) -> list[Host]:
    """The hosts of a host file, or those of names such as `node-1,node-2`, each with one slot. Raises `UserError` like `read_hosts`."""
    if "/" in text or Path(text).exists():
        return read_hosts(Path(text))
    return _parsed([name.strip() for name in text.split(",")], "--hosts")


def _parsed(lines: Sequence[str], source: str) -> list[Host]:
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        if text := line.partition("#")[0].strip():
            found = _LINE.match(text)
            # One colon is MPI's way to count slots, and no name; an IPv6 address has several.
            if not found or found[2] == "0" or found[1].startswith("-") or found[1].count(":") == 1:
                raise UserError(f"{source}:{number}: {text!r} is not a host; write for example: node-1 slots=8")
            if found[1] in hosts:
                raise UserError(f"{source}:{number}: {found[1]} is listed twice; give all of its slots on one line")
            hosts[found[1]] = Host(found[1], int(found[2] or 1))
    if not hosts:
        raise UserError(f"{source} names no host; write one per line, such as: node-1 slots=8")
    return list(hosts.values())


def command_on(host: Host, script: str, ssh: str | None) -> list[str]:
    """The command of this machine that runs a shell script on a host; `ssh` is None for this machine itself."""
    return ["sh", "-c", script] if ssh is None else [*shlex.split(ssh), host.name, script]


class HostTable:
    """Active and excluded hosts, stored in RUN/launch/hosts.json. Excluded hosts stay excluded in later launches until they are
    readmitted, also those that a launch in between did not have: each Slurm job gets other nodes."""

    def __init__(self, path: Path, hosts: list[Host]) -> None:
        self.path = path
        before = {host.name: host for host in read_table(path)}
        self._hosts = {host.name: replace(before.get(host.name, host), slots=host.slots) for host in hosts}
        self._absent = {name: host for name, host in before.items() if host.excluded is not None and name not in self._hosts}
        self._write()

    def all(self) -> list[Host]:
        return list(self._hosts.values())

    def active(self) -> list[Host]:
        return [host for host in self.all() if host.excluded is None]

    def exclude(self, name: str, reason: str) -> None:
        self._hosts[name] = Host(name, self._hosts[name].slots, reason, round(time.time(), 3))
        self._write()

    def readmit(self, name: str) -> bool:
        """Make a host active again; False if it is unknown, was not excluded or is not of this launch."""
        host = self._hosts.get(name)
        if host is None or host.excluded is None:
            if self._absent.pop(name, None) is not None:
                self._write()
            return False
        self._hosts[name] = Host(name, host.slots, None, round(time.time(), 3))
        self._write()
        return True

    def _write(self) -> None:
        write_json(self.path, {"hosts": [asdict(host) for host in (*self.all(), *self._absent.values())]})


def read_table(path: Path) -> list[Host]:
    """Read the table of an earlier launch; empty if there was none."""
    return [Host(**host) for host in read_json(path)["hosts"]] if path.exists() else []


_UNLIMITED = 1_000_000  # restarts: the ranks themselves end a run that makes no progress
_LAST_CALL = 10  # seconds to wait for more nodes once the minimum number has joined
_KEEP_ALIVE = 3  # seconds between keep-alives; a node that misses three is lost


@dataclass(frozen=True)
class CountRange:
    """Minimum and maximum number of ranks or nodes."""

    minimum: int
    maximum: int

    @classmethod
    def parse(cls, text: str) -> CountRange:
        """Parse `4`, or `2:4` for a range."""
        first, colon, last = text.partition(":")
        if not first.isdigit() or (colon and not last.isdigit()) or not 0 < int(first) <= int(last or first):
            raise UserError(f"{text!r} is not a number of ranks; write for example 4, or 2:4 for any number from 2 to 4")
        return cls(int(first), int(last or first))

    def __str__(self) -> str:
        return f"{self.minimum}:{self.maximum}"


@dataclass(frozen=True)
class Agent:
    """One `torchrun` agent with `ranks` processes, for a run on `nodes` nodes.

    Each rank runs the Python module `module` with `arguments`. `endpoint` (HOST:PORT) is the rendezvous endpoint; `is_store_host` is None
    if `torchrun` decides which agent hosts the rendezvous store. `grace` is in seconds. `variables`: environment variables of the recipe.
    `ranks_here`: of several agents on one machine, the ranks of those before this one, and of all.
    """

    folder: LaunchDir
    nodes: CountRange
    ranks: int
    endpoint: str
    name: str
    arguments: Sequence[str]
    grace: float
    address: str | None = None
    is_store_host: bool | None = None
    module: str = "lmworks.cli.rank"
    variables: Mapping[str, str] = field(default_factory=dict)
    ranks_here: tuple[int, int] | None = None

    def command(self) -> list[str]:
        rendezvous = {"last_call_timeout": _LAST_CALL, "keep_alive_interval": _KEEP_ALIVE}
        if self.is_store_host is not None:
            rendezvous["is_host"] = int(self.is_store_host)
        options = {
            "nnodes": str(self.nodes), "nproc-per-node": self.ranks, "rdzv-backend": "c10d", "rdzv-endpoint": self.endpoint,
            "rdzv-id": self.name, "rdzv-conf": ",".join(f"{key}={value}" for key, value in rendezvous.items()), "max-restarts": _UNLIMITED,
            "monitor-interval": 0.2, "local-addr": self.address,
        }  # fmt: skip
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return [sys.executable, "-m", "lmworks.launch.agent", *given, "-m", self.module, *self.arguments]

    def environment(self, host: str | None = None) -> Mapping[str, str]:
        variables = dict(reveal(self.variables)) | {
            VARIABLE: str(self.folder.path),
            "PYTHONSAFEPATH": "1",  # neither the agent nor its ranks import files of the working directory
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(self.grace)),
            # The agents' store outlives the process group: restarted ranks would find keys of the last group in it.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        variables |= {COMMAND: os.environ[COMMAND]} if COMMAND in os.environ else {}
        if self.ranks_here is not None:
            variables |= {RANKS_HERE: "{}/{}".format(*self.ranks_here)}
        return variables | ({HOST: host} if host else {}) | ({"GLOO_SOCKET_IFNAME": "lo"} if self.address == "127.0.0.1" else {})

    def script(self, host: str, directory: Path) -> str:
        """Shell commands for a host: see that the ranks can be imported, run the agent with its standard error in a log, and kill it when
        standard input closes, which is when the process that started the shell has ended."""
        log = shlex.quote(str(log_of(self.folder, host)))
        # A rank that cannot be imported says nothing to anyone, and torchrun would start it again for ever.
        imports = shlex.join([sys.executable, "-P", "-c", f"import {self.module}"])
        return self._script(host, directory, [f"{imports} 2>>{log} </dev/null || exit 254"], self.command(), log)

    def cache_script(self, host: str, directory: Path, run_dir: Path) -> str:
        """Shell commands for a spare host: keep the data of the next steps in its cache until standard input closes."""
        status = self.folder.spares / f"{file_name(host)}.json"
        command = [sys.executable, "-P", "-m", "lmworks.cli.main", "data", "cache", str(run_dir.absolute()), "--follow", str(status)]
        return self._script(host, directory, [], command, shlex.quote(str(log_of(self.folder, f"{host}-cache"))))

    def _script(self, host: str, directory: Path, before: Sequence[str], command: Sequence[str], log: str) -> str:
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment(host).items())
        return "\n".join((
            f"cd {shlex.quote(str(directory))} || exit 255",
            f"export {exports}",
            *before,
            "exec 3<&0",
            "trap : TERM USR1",  # Slurm signals this shell with the agent, which needs time to end its ranks
            f"{shlex.join(command)} 2>>{log} </dev/null 3<&- & agent=$!",
            "{ cat <&3 >/dev/null; kill $agent; } >/dev/null 2>&1 & watch=$!",
            "exec 3<&-; while wait $agent; code=$?; kill -0 $agent 2>/dev/null; do :; done; kill $watch 2>/dev/null; exit $code",
            "",
        ))  # fmt: skip


def log_of(folder: LaunchDir, host: str) -> Path:
    """The log of an agent's standard error."""
    return folder.logs / f"{file_name(host)}.log"
