"""Heartbeats: each rank writes its state to a file of its own, from which a failure is diagnosed after the ranks have ended.

A rank writes at every step what it is about to do. When a collective fails, it also writes which collectives it has entered; a rank that
has not entered the collective in which the others wait is the one that was missing.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HOST = "LMWORKS_HOST"  # environment variable with the launcher's name of this machine
_PADDED = 512  # bytes: every heartbeat is padded, so that a shorter one overwrites a longer one


@dataclass(frozen=True)
class Entered:
    """The latest collective that a rank has entered in a process group: its sequence number, name and time (seconds since 1970)."""

    number: int
    name: str
    time: float


@dataclass(frozen=True)
class Beat:
    """The last state that a rank has written.

    `state`: running; left (exited normally); failed (with an exception of its own); cut (a collective failed because another rank was
    missing); told (its main thread was busy when another rank failed, and the monitor thread wrote the heartbeat).
    `host` is the launcher's name of the host, `machine` its host name. `seen` is when the process last touched the file, `time` when
    its main thread last wrote a heartbeat; seconds since 1970.
    """

    rank: int
    host: str
    machine: str
    pid: int
    step: int = 0
    doing: str = "starting"
    time: float = 0.0
    state: str = "running"
    reason: str = ""
    entered: Mapping[str, Entered] = field(default_factory=dict)
    seen: float = 0.0


class Heartbeat:
    """Heartbeats of one rank in `directory`/RANK.json; does nothing without a directory.

    A heartbeat is one `pwrite` of half a kilobyte (a few microseconds). The operating system has it when the call returns, so the last
    heartbeat of a killed rank is never lost.
    """

    def __init__(self, directory: Path | None, rank: int = 0) -> None:
        self._fd, self._lock, machine = -1, threading.Lock(), socket.gethostname()
        self.directory = directory
        self._last = Beat(rank, os.environ.get(HOST, machine), machine, os.getpid(), time=time.time())
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._fd = os.open(Path(directory) / f"{rank}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            self._write(self._last)

    def beat(self, step: int, doing: str) -> None:
        """Record that the main thread is at `step` (counted from 0) and begins an activity: data, forward, update, save, ..."""
        if self._fd >= 0:
            self._write(replace(self._last, step=step, doing=doing, time=time.time(), state="running"))

    def touch(self) -> None:
        """Show that the process is alive, whatever its main thread does."""
        with self._lock:
            if self._fd >= 0:
                os.utime(self._fd)

    def record_witness(self, entered: Mapping[str, Entered]) -> None:
        """Write what this rank was doing when another rank failed."""
        self._write(replace(self._last, state="told", entered=entered))

    def end(self, state: str, reason: str = "", entered: Mapping[str, Entered] | None = None) -> None:
        """Write the final state; later beats are ignored."""
        self._write(replace(self._last, state=state, reason=reason, entered=entered or {}))
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _write(self, beat: Beat) -> None:
        text = json.dumps({name: value for name, value in asdict(beat).items() if name != "seen"}, separators=(",", ":"))
        with self._lock:
            self._last = beat
            if self._fd >= 0:
                with suppress(OSError):  # a full disk or a quota; `touch` still shows that the process is alive
                    os.pwrite(self._fd, text.encode().ljust(_PADDED) + b"\n", 0)


def read_beats(directory: Path) -> list[Beat]:
    """The last heartbeat of every rank, sorted by rank; files without one yet are omitted."""
    found = []
    for path in Path(directory).glob("*.json"):
        try:
            tree: dict[str, Any] = json.loads(path.read_bytes().partition(b"\n")[0])
            seen = path.stat().st_mtime
        except (ValueError, FileNotFoundError):
            continue
        entered = {group: Entered(**one) for group, one in tree.pop("entered").items()}
        found.append(Beat(**tree, entered=entered, seen=seen))
    return sorted(found, key=lambda beat: beat.rank)


_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo, and of NCCL in builds that have it


def entered_collectives() -> dict[str, Entered]:
    """The latest collective that this process has entered in each process group, from torch's flight recorder.

    Empty if nothing was recorded: `TORCH_FR_BUFFER_SIZE` must be set before the first process group is created. torch has no public
    function that reads the recorder from within a process.
    """
    import torch

    found: dict[str, Entered] = {}
    for recorder in _RECORDERS:
        dump = getattr(getattr(torch._C, "_distributed_c10d", None), recorder, None)
        tree = json.loads(dump()) if dump else {}
        for entry in tree.get("entries", ()):  # oldest first
            group, name = entry["process_group"]
            members = tree["pg_config"].get(group, {}).get("ranks", "")
            key = f"{name if name not in ('', 'undefined') else group} {members}".removesuffix(" []").rstrip()
            entered = Entered(int(entry["collective_seq_id"]), entry["profiling_name"].partition(":")[2], entry["time_created_ns"] / 1e9)
            if key not in found or found[key].time <= entered.time:
                found[key] = entered
    return found
