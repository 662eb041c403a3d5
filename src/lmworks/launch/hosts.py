"""The hosts of a launch: the file that names them, and the table of who takes part."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lmworks.errors import UserError
from lmworks.files import read_json, write_json

_LINE = re.compile(r"^(\S+?)(?:\s+slots\s*=\s*(\d+))?$")


@dataclass(frozen=True)
class Host:
    """A machine and the ranks that it can run; with the reason and the time (seconds since 1970) where it does not take part."""

    name: str
    slots: int
    excluded: str | None = None
    since: float | None = None


def read_hosts(path: Path) -> list[Host]:
    """One host per line, `NAME slots=N` (1 where left out); # begins a remark. Raises `UserError` naming the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
        raise UserError(f"{path} is not a host file; write one host per line, such as: node-1 slots=8") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        if text := line.partition("#")[0].strip():
            found = _LINE.match(text)
            if not found or found[2] == "0" or found[1].startswith("-"):
                raise UserError(f"{path}:{number}: {text!r} is not a host; write for example: node-1 slots=8")
            if found[1] in hosts:
                raise UserError(f"{path}:{number}: {found[1]} stands there twice; give it all its slots in one line")
            hosts[found[1]] = Host(found[1], int(found[2] or 1))
    if not hosts:
        raise UserError(f"{path} names no host; write one per line, such as: node-1 slots=8")
    return list(hosts.values())


class Table:
    """Who takes part, in RUN/launch/hosts.json: hosts that were excluded stay so in later launches, until they are readmitted."""

    def __init__(self, path: Path, hosts: list[Host]) -> None:
        self.path = path
        before = {one.name: one for one in read_table(path)}
        self._hosts = {one.name: Host(one.name, one.slots, *_fate(before.get(one.name))) for one in hosts}
        self._write()

    def all(self) -> list[Host]:
        return list(self._hosts.values())

    def taking_part(self) -> list[Host]:
        return [one for one in self.all() if one.excluded is None]

    def exclude(self, name: str, reason: str) -> None:
        self._hosts[name] = Host(name, self._hosts[name].slots, reason, round(time.time(), 3))
        self._write()

    def readmit(self, name: str) -> bool:
        """Whether the host was there and excluded."""
        one = self._hosts.get(name)
        if one is None or one.excluded is None:
            return False
        self._hosts[name] = Host(name, one.slots)
        self._write()
        return True

    def _write(self) -> None:
        write_json(self.path, {"hosts": [asdict(one) for one in self.all()]})


def _fate(before: Host | None) -> tuple[str | None, float | None]:
    return (before.excluded, before.since) if before else (None, None)


def read_table(path: Path) -> list[Host]:
    """The table of an earlier launch; empty where there was none."""
    return [Host(**one) for one in read_json(path)["hosts"]] if path.exists() else []
