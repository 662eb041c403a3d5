"""The command that starts the ranks of one place (this machine, a host, a node): a `torchrun` agent."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmworks.errors import UserError
from lmworks.launch.folder import COMMAND, VARIABLE, Folder
from lmworks.watch.heartbeat import HOST

_ALWAYS = 1_000_000  # restarts: the ranks themselves end a run that makes no progress
_LAST_CALL = 10  # seconds that a world of the least size waits for more places before it begins
_KEEP_ALIVE = 3  # seconds; three missed ones, and a place is gone


@dataclass(frozen=True)
class CountRange:
    """Least and most, of ranks or places."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> CountRange:
        """`4`, or `2:4` for anything between."""
        first, colon, last = text.partition(":")
        if not first.isdigit() or (colon and not last.isdigit()) or not 0 < int(first) <= int(last or first):
            raise UserError(f"{text!r} is not a number of ranks; write for example 4, or 2:4 for any number from 2 to 4")
        return cls(int(first), int(last or first))

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


@dataclass(frozen=True)
class Agent:
    """One `torchrun` of `ranks` processes.

    `module` is what Python runs as a rank, with `work` as its arguments. `endpoint` (HOST:PORT) is where the places meet; `hosts_it` is
    None where `torchrun` finds out itself who keeps the meeting's store.
    """

    folder: Folder
    places: CountRange
    ranks: int
    endpoint: str
    name: str
    work: Sequence[str]
    grace: float
    address: str | None = None
    hosts_it: bool | None = None
    module: str = "lmworks.cli.rank"

    def command(self) -> list[str]:
        meeting = {"last_call_timeout": _LAST_CALL, "keep_alive_interval": _KEEP_ALIVE}
        if self.hosts_it is not None:
            meeting["is_host"] = int(self.hosts_it)
        options = {
            "nnodes": str(self.places), "nproc-per-node": self.ranks, "rdzv-backend": "c10d", "rdzv-endpoint": self.endpoint,
            "rdzv-id": self.name, "rdzv-conf": ",".join(f"{key}={value}" for key, value in meeting.items()), "max-restarts": _ALWAYS,
            "monitor-interval": 0.2, "local-addr": self.address,
        }  # fmt: skip
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return [sys.executable, "-m", "torch.distributed.run", *given, "-m", self.module, *self.work]

    def environment(self, host: str | None = None) -> Mapping[str, str]:
        always = {
            VARIABLE: str(self.folder.path),
            "PYTHONSAFEPATH": "1",  # no file in the working directory is a module, for the agent or its ranks
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(self.grace)),
            # The agents' store outlives a world: the ranks of the next one would find in it what those of the last have left.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        always |= {COMMAND: os.environ[COMMAND]} if COMMAND in os.environ else {}
        return always | ({HOST: host} if host else {}) | ({"GLOO_SOCKET_IFNAME": "lo"} if self.address == "127.0.0.1" else {})

    def script(self, host: str, directory: Path) -> str:
        """Shell commands for a host: the agent, its remarks in a log, ended when whoever started the shell is gone (its input ends)."""
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment(host).items())
        log = shlex.quote(str(log_of(self.folder, host)))
        return "\n".join((
            f"cd {shlex.quote(str(directory))} || exit 255",
            "exec 3<&0",
            f"{exports} {shlex.join(self.command())} 2>>{log} </dev/null 3<&- & agent=$!",
            "{ cat <&3 >/dev/null; kill $agent; } >/dev/null 2>&1 & watch=$!",
            "exec 3<&-; wait $agent; code=$?; kill $watch; exit $code",
            "",
        ))  # fmt: skip


def log_of(folder: Folder, host: str) -> Path:
    """Where the remarks of an agent go."""
    return folder.logs / f"{host.replace('/', '_')}.log"
