"""The hosts of a launch: the host file, and the table of active and excluded hosts."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lmworks.errors import UserError
from lmworks.files import open_regular, read_json, write_json

_MOST = 1 << 26  # bytes of a host file: a million names
_LINE = re.compile(r"^(\S+?)(?:\s+slots\s*=\s*(\d+))?$")


@dataclass(frozen=True)
class Host:
    """A machine and the number of ranks that it can run. `excluded` is the reason why it is not used, `since` the time (seconds since
    1970)."""

    name: str
    slots: int
    excluded: str | None = None
    since: float | None = None


def read_hosts(path: Path) -> list[Host]:
    """Read one host per line, `NAME slots=N` (default 1); # starts a comment. Raises `UserError` that names the line."""
    try:
        with open_regular(Path(path)) as handle:
            lines = handle.read(_MOST).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{path} is not a host file; write one host per line, such as: node-1 slots=8") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        if text := line.partition("#")[0].strip():
            found = _LINE.match(text)
            if not found or found[2] == "0" or found[1].startswith("-"):
                raise UserError(f"{path}:{number}: {text!r} is not a host; write for example: node-1 slots=8")
            if found[1] in hosts:
                raise UserError(f"{path}:{number}: {found[1]} is listed twice; give all of its slots on one line")
            hosts[found[1]] = Host(found[1], int(found[2] or 1))
    if not hosts:
        raise UserError(f"{path} names no host; write one per line, such as: node-1 slots=8")
    return list(hosts.values())


class HostTable:
    """Active and excluded hosts, stored in RUN/launch/hosts.json. Excluded hosts stay excluded in later launches until they are
    readmitted."""

    def __init__(self, path: Path, hosts: list[Host]) -> None:
        self.path = path
        before = {host.name: host for host in read_table(path)}
        self._hosts = {host.name: replace(before.get(host.name, host), slots=host.slots) for host in hosts}
        self._write()

    def all(self) -> list[Host]:
        return list(self._hosts.values())

    def active(self) -> list[Host]:
        return [host for host in self.all() if host.excluded is None]

    def exclude(self, name: str, reason: str) -> None:
        self._hosts[name] = Host(name, self._hosts[name].slots, reason, round(time.time(), 3))
        self._write()

    def readmit(self, name: str) -> bool:
        """Make a host active again; False if it is unknown or was not excluded."""
        host = self._hosts.get(name)
        if host is None or host.excluded is None:
            return False
        self._hosts[name] = Host(name, host.slots)
        self._write()
        return True

    def _write(self) -> None:
        write_json(self.path, {"hosts": [asdict(host) for host in self.all()]})


def read_table(path: Path) -> list[Host]:
    """Read the table of an earlier launch; empty if there was none."""
    return [Host(**host) for host in read_json(path)["hosts"]] if path.exists() else []
