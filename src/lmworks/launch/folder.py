"""RUN/launch: how the launcher and the ranks speak to each other, by files that all of them see."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.files import explain_os_errors, read_json, sync_directory, write_bytes, write_text

VARIABLE = "LMWORKS_LAUNCH"  # the environment variable by which a rank finds the folder
COMMAND = "LMWORKS_COMMAND"  # the one by which it knows the command that goes on with the run
_LAST_WORD = 4096  # bytes kept for how the run ends: a full disk is one of the ways


@dataclass(frozen=True)
class Folder:
    """`stop` asks all ranks to save and leave. `failed` says that a rank of the present world has failed. `outcome` is how the run has
    ended; until it is there, whoever ends is started again. `unmet` has a byte for each start of the first rank
    since the ranks last met.
    """

    path: Path

    @classmethod
    def of(cls, run_dir: Path) -> Folder:
        return cls(Path(run_dir).absolute() / "launch")

    @property
    def beats(self) -> Path:
        return self.path / "heartbeats"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def failed(self) -> Path:
        return self.path / "failed"

    @property
    def unmet(self) -> Path:
        return self.path / "unmet"

    @property
    def hosts(self) -> Path:
        return self.path / "hosts.json"

    def begin(self) -> None:
        """Before the first rank: forget what an earlier launch has left to say."""
        for name in ("stop", "outcome.json", "failed", "unmet"):
            (self.path / name).unlink(missing_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        write_bytes(self._kept, b" " * _LAST_WORD)

    @property
    def _kept(self) -> Path:
        return self.path / "outcome.kept"

    def ask_to_stop(self, by: signal.Signals) -> None:
        write_text(self.path / "stop", by.name)

    def stop(self) -> signal.Signals | None:
        """The signal by which the ranks are asked to stop."""
        try:
            return signal.Signals[(self.path / "stop").read_text(encoding="utf-8").strip()]
        except (FileNotFoundError, KeyError):
            return None

    def conclude(self, code: int, rank: int, message: str = "") -> None:
        """The run is over, with this exit code. Needs no room on the disk but what `begin` has kept."""
        text = json.dumps({"code": code, "rank": rank, "message": message}).encode() + b"\n"
        path = self.path / "outcome.json"
        if not self._kept.exists():
            write_bytes(path, text)
            return
        with explain_os_errors(path):
            with open(self._kept, "r+b") as handle:
                handle.write(text.ljust(_LAST_WORD))
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(self._kept, path)
            sync_directory(self.path)

    def outcome(self) -> dict[str, Any] | None:
        path = self.path / "outcome.json"
        return dict(read_json(path)) if path.exists() else None

    def readmit(self, host: str) -> None:
        """Ask the launcher to take a host back."""
        write_text(self.path / "readmit" / host.replace("/", "_"), host)

    def readmitted(self) -> list[str]:
        """The hosts that somebody wants back; each is told once."""
        hosts = []
        for path in sorted((self.path / "readmit").glob("[!.]*")):
            hosts.append(path.read_text(encoding="utf-8"))
            path.unlink()
        return hosts
