"""RUN/launch: files on a shared file system through which the launcher and the ranks communicate."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.io.files import explain_os_errors, read_json, sync_directory, try_lock, write_bytes, write_json, write_text
from lmworks.ui.exit_codes import ExitCode
from lmworks.watch.ledger import LEDGER, Ledger, events_of

VARIABLE = "LMWORKS_LAUNCH"  # environment variable with the path of the directory
COMMAND = "LMWORKS_COMMAND"  # environment variable with the command that resumes the run
_OUTCOME_BYTES = 4096  # reserved for outcome.json, so that it can be written when the disk is full
_GIVEN_UP = "given up"
_LONGEST_REASON = 500  # characters, of up to six bytes in JSON


def file_name(host: str) -> str:
    """The name of a host in names of files."""
    return host.replace("/", "_")


@dataclass(frozen=True)
class LaunchDir:
    """The files: `stop` asks all ranks to save a checkpoint and exit; `failed` marks the current process group as broken, or as given up
    (`give_up_group`); `outcome.json` is the result of the run, and ranks that exit before it exists are restarted; `unmet` has one byte per
    start of rank 0 since the last successful rendezvous; `events/` has what the launcher has done about hosts, which rank 0 moves to the
    ledger. `lock` is held by the launcher (`lock_launch`), and `alive` by each of its ranks.
    """

    path: Path

    @classmethod
    def of(cls, run_dir: Path) -> LaunchDir:
        return cls(Path(run_dir).absolute() / "launch")

    @property
    def heartbeats(self) -> Path:
        return self.path / "heartbeats"

    @property
    def records(self) -> Path:
        """What ranks have recorded of their collectives, written when one has failed."""
        return self.path / "flight_recorder"

    @property
    def last_records(self) -> Path:
        """The records of the last failure that was diagnosed."""
        return self.path / "last_failure"

    @property
    def exits(self) -> Path:
        """How ranks have ended, as their agents have recorded it, until it is written to the ledger."""
        return self.path / "exits"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def failed(self) -> Path:
        return self.path / "failed"

    def give_up_group(self) -> None:
        """Have the ranks of the current process group leave it within seconds, as after a failure, but without one that is diagnosed or
        counted: the launcher is about to take a host away."""
        if not self.failed.exists():
            write_text(self.failed, _GIVEN_UP)

    def is_group_given_up(self) -> bool:
        try:
            return self.failed.read_text(encoding="utf-8") == _GIVEN_UP
        except FileNotFoundError:
            return False

    @property
    def alive(self) -> Path:
        return self.path / "alive"

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Within the block this process is a rank that is alive, which a later launch on any machine can tell also after the launcher was
        killed."""
        self.path.mkdir(parents=True, exist_ok=True)
        fds = [os.open(self.alive, os.O_RDONLY | os.O_CREAT, 0o644)]

        def leave() -> None:
            while fds:
                os.close(fds.pop())

        os.register_at_fork(after_in_child=leave)  # a child that outlives the rank would share its lock
        fcntl.flock(fds[0], fcntl.LOCK_SH)
        try:
            yield
        finally:
            leave()

    def has_ranks(self) -> bool:
        """Whether a rank is alive. For the holder of the launch lock only: ranks share this lock, so the look excludes any other look, as
        long as it lasts."""
        with suppress(FileNotFoundError), open(self.alive, "r+b") as handle:
            return not try_lock(handle.fileno())
        return False

    @property
    def failed_starts(self) -> Path:
        return self.path / "unmet"

    @property
    def spares(self) -> Path:
        """HOST.json: the steps whose data a spare host has in its cache."""
        return self.path / "spares"

    @property
    def hosts(self) -> Path:
        return self.path / "hosts.json"

    def last_words(self) -> str:
        """The last line of the newest log that has one."""
        logs = sorted(self.logs.glob("*.log"), key=lambda path: path.stat().st_mtime)
        lines = [line for path in logs for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return " ".join(lines[-1].split())[:200] if lines else ""

    def begin(self) -> None:
        """Remove the messages of an earlier launch, before the first rank starts."""
        for name in ("stop", "outcome.json", "failed", "unmet"):
            (self.path / name).unlink(missing_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        write_bytes(self._reserved, b" " * _OUTCOME_BYTES)

    @property
    def _reserved(self) -> Path:
        return self.path / "outcome.kept"

    def request_stop(self, by: signal.Signals) -> None:
        write_text(self.path / "stop", by.name)

    def stop_signal(self) -> signal.Signals | None:
        """The signal with which the ranks are asked to stop; None if they are not."""
        try:
            return signal.Signals[(self.path / "stop").read_text(encoding="utf-8").strip()]
        except (FileNotFoundError, KeyError):
            return None

    def conclude(self, code: int, rank: int, message: str = "", reason: str = "") -> None:
        """Record that the run is over, with this exit code. Needs no disk space beyond the file that `begin` reserved. `message` is printed
        by the launcher; `reason` is what the rank has printed itself."""
        outcome = {"code": code, "rank": rank, "message": message} | ({"reason": reason[:_LONGEST_REASON]} if reason else {})
        text = json.dumps(outcome).encode() + b"\n"
        path = self.path / "outcome.json"
        if not self._reserved.exists():
            write_bytes(path, text)
            return
        with explain_os_errors(path):
            with open(self._reserved, "r+b") as handle:
                handle.write(text.ljust(_OUTCOME_BYTES))
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(self._reserved, path)
            sync_directory(self.path)

    def outcome(self) -> dict[str, Any] | None:
        path = self.path / "outcome.json"
        return dict(read_json(path)) if path.exists() else None

    def announce(self, event: str, **fields: Any) -> None:
        """Leave an event for the ledger, which only one process may write at a time."""
        write_json(self.path / "events" / f"{time.time_ns()}.json", {"event": event, **fields})

    def record_announcements(self, run_dir: Path) -> None:
        """Move the events that wait to the ledger, oldest first."""
        if found := sorted((self.path / "events").glob("[!.]*.json")):
            with Ledger(run_dir / LEDGER) as ledger:
                for path in found:
                    event = dict(read_json(path))
                    ledger.write(event.pop("event"), **event)
                    path.unlink()

    def readmit(self, host: str) -> None:
        """Ask the launcher to readmit a host."""
        write_text(self.path / "readmit" / file_name(host), host)

    def take_readmissions(self) -> list[str]:
        """The hosts to readmit; removes the requests, so each is returned once."""
        hosts = []
        for path in sorted((self.path / "readmit").glob("[!.]*")):
            hosts.append(path.read_text(encoding="utf-8"))
            path.unlink()
        return hosts


def reason_of_end(run_dir: Path) -> str:
    """Why a launch has ended, from what its ranks have left."""
    folder = LaunchDir.of(run_dir)
    outcome = folder.outcome()
    if outcome is None or outcome["code"] == ExitCode.OK:
        return ""
    if found := outcome["message"] or outcome.get("reason"):
        return str(found)
    if outcome["rank"]:
        return f"rank {outcome['rank']} ended the run; see {folder.logs}/rank-{outcome['rank']}.log"
    restarts = events_of(run_dir, "restart")
    return f"the last failure of its ranks: {restarts[-1].get('reason')}" if restarts else ""
