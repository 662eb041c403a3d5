"""The command that starts the ranks of one node (this machine, a host, a Slurm node): a `torchrun` agent."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmworks.credentials import reveal
from lmworks.errors import UserError
from lmworks.launch.launch_dir import COMMAND, VARIABLE, LaunchDir
from lmworks.machine import RANKS_HERE
from lmworks.watch.heartbeat import HOST

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
        return [sys.executable, "-m", "torch.distributed.run", *given, "-m", self.module, *self.arguments]

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
        """Shell commands for a host: run the agent with its standard error in a log, and kill it when standard input closes, which is when
        the process that started the shell has ended."""
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


def log_of(folder: LaunchDir, host: str) -> Path:
    """The log of an agent's standard error."""
    return folder.logs / f"{host.replace('/', '_')}.log"
