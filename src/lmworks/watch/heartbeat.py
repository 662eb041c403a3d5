"""Heartbeats: each rank writes its state to a file of its own, from which a failure is diagnosed after the ranks have ended.

The file is in memory of the rank's machine. It is copied to the shared folder of the launch at a rate that does not grow with the number
of ranks (`shared_interval`), and at once when the rank ends or another one fails. So the last heartbeat is known of every rank whose
machine has survived, and of a machine that is lost, the one of at most an interval before.

A rank writes at every step what it is about to do. When a collective fails, it also writes which collectives it has entered; a rank that
has not entered the collective in which the others wait is the one that was missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from lmworks.io.files import private_folder
from lmworks.watch.flight_recorder import Entered, read_record

HOST = "LMWORKS_HOST"  # environment variable with the launcher's name of this machine
_TURNS = 500
"""Turns a second in which all ranks together access the shared folder of a launch.

A turn is at most six requests to a file server: a heartbeat (write, commit, time) and three questions (has a rank failed, is there a
request to stop, is the run over). That makes 3,000 a second, of the tens of thousands that a server answers.
"""
_SHORTEST = 0.5  # seconds between two turns of a rank
_PADDED = 512  # bytes: every heartbeat is padded, so that a shorter one overwrites a longer one


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
    """Heartbeats of one rank: at once in a file of this machine, and with `share` in `directory`/RANK.json, where all machines see them;
    does nothing without a directory.

    The main thread only writes the local file, one `pwrite` of half a kilobyte into memory (a few microseconds), so a shared folder that
    is slow or hangs does not delay it. The operating system has the heartbeat when the call returns: that of a killed rank is not lost
    (`recover_beats`). Where no local file can be made, only what was shared is known of a killed rank. Without `shares` the heartbeats stay
    on this machine.
    """

    def __init__(self, directory: Path | None, rank: int = 0, shares: bool = True) -> None:
        self._local = self._shared = -1  # file descriptors
        self._lock, self._sharing, machine = threading.Lock(), threading.Lock(), socket.gethostname()
        self.directory, self._ended, self._shares = directory, directory is None, shares
        self._last = Beat(rank, os.environ.get(HOST, machine), machine, os.getpid(), time=time.time())
        if directory is not None:
            with suppress(OSError):
                self._local = os.open(_local_file(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            self._write(self._last)

    @property
    def rank(self) -> int:
        return self._last.rank

    def beat(self, step: int, doing: str) -> None:
        """Record that the main thread is at `step` (counted from 0) and begins an activity: data, forward, update, save, ..."""
        self._write(replace(self._last, step=step, doing=doing, time=time.time(), state="running"))

    def touch(self) -> None:
        """Show that the process is alive, whatever its main thread does."""
        with self._lock:
            if not self._ended:
                self._last = replace(self._last, seen=time.time())
                if self._local >= 0:
                    os.utime(self._local, (self._last.seen,) * 2)

    def share(self) -> bool:
        """Copy the last heartbeat to the shared folder, for a thread beside the main one; whether it was written."""
        with self._sharing:
            with self._lock:
                beat = self._last
            if self.directory is None or self._ended or not self._shares:
                return False
            try:
                if self._shared < 0:
                    Path(self.directory).mkdir(parents=True, exist_ok=True)
                    self._shared = os.open(Path(self.directory) / f"{beat.rank}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.pwrite(self._shared, _text(beat), 0)
                os.utime(self._shared, (beat.seen,) * 2)  # on NFS this also sends what was written
            except OSError:  # a full disk or a quota; the next turn tries again
                return False
            return True

    def record_witness(self, entered: Mapping[str, Entered]) -> None:
        """Write and share what this rank was doing when another rank failed."""
        self._write(replace(self._last, state="told", entered=entered))
        self.share()

    def end(self, state: str, reason: str = "", entered: Mapping[str, Entered] | None = None) -> None:
        """Write and share the final state; later beats are ignored."""
        self._write(replace(self._last, state=state, reason=reason, entered=entered or {}))
        shared = self.share()
        with self._sharing, self._lock:
            self._ended = True
            for fd in (self._local, self._shared):
                if fd >= 0:
                    os.close(fd)
            if self.directory is not None and self._local >= 0 and (shared or not self._shares):
                _local_file(self.directory, self._last.rank).unlink(missing_ok=True)
            self._local = self._shared = -1

    def _write(self, beat: Beat) -> None:
        with self._lock:
            if not self._ended:
                self._last = replace(beat, seen=time.time())
                if self._local >= 0:
                    with suppress(OSError):  # no memory left; `touch` still shows that the process is alive
                        os.pwrite(self._local, _text(self._last), 0)


def _text(beat: Beat) -> bytes:
    fields = {name: value for name, value in asdict(beat).items() if name != "seen"}  # which is the time of the file
    return json.dumps(fields, separators=(",", ":")).encode().ljust(_PADDED) + b"\n"


def _local_file(directory: Path, rank: int | str) -> Path:
    """The file of a rank's heartbeats on this machine. Raises OSError if there is no place that only this user can write to."""
    launch = hashlib.sha256(os.path.abspath(directory).encode()).hexdigest()[:16]
    return private_folder() / f"{launch}-{rank}.json"


def _read(path: Path) -> Beat | None:
    """The heartbeat in a file; None if there is none, or not a whole one yet."""
    try:
        tree: dict[str, Any] = json.loads(path.read_bytes().partition(b"\n")[0])
        seen = path.stat().st_mtime
    except (ValueError, FileNotFoundError):
        return None
    entered = {group: Entered(**one) for group, one in tree.pop("entered").items()}
    return Beat(**tree, entered=entered, seen=seen)


def read_beats(directory: Path) -> list[Beat]:
    """The last heartbeat that every rank has shared, sorted by rank; files without one yet are omitted."""
    found = [beat for path in Path(directory).glob("*.json") if (beat := _read(path)) is not None]
    return sorted(found, key=lambda beat: beat.rank)


def read_local_beats(directory: Path) -> list[Beat]:
    """The last heartbeat of every rank of this machine that has not shared its end, sorted by rank."""
    try:
        paths = _local_file(directory, "*")
    except OSError:
        return []
    found = [beat for path in paths.parent.glob(paths.name) if (beat := _read(path)) is not None]
    return sorted(found, key=lambda beat: beat.rank)


def recover_beats(directory: Path, records: Path) -> None:
    """Share the last heartbeats of ranks of this machine whose processes were killed before they could.

    NCCL's watchdog ends a process whose collective has timed out: what it has left in `records` makes the heartbeat that of a rank that
    was cut. A file that an earlier start has left is deleted: the shared heartbeat of its rank is that of another process.
    """
    for beat in read_local_beats(directory):
        path, shared = _local_file(directory, beat.rank), Path(directory) / f"{beat.rank}.json"
        if not has_ended(beat):
            continue
        with suppress(OSError):
            if (before := _read(shared)) is not None and (before.machine, before.pid) == (beat.machine, beat.pid):
                if beat.state == "running" and (entered := read_record(records, beat.rank, beat.time)):
                    beat = replace(beat, state="cut", reason="its collective timed out", entered=entered)
                shared.write_bytes(_text(beat))
                os.utime(shared, (beat.seen,) * 2)
            path.unlink()


def has_ended(beat: Beat) -> bool:
    """Whether the process of a rank of this machine has ended, or another one has its number."""
    try:
        process = psutil.Process(beat.pid)
        return process.status() == psutil.STATUS_ZOMBIE or process.create_time() > beat.seen
    except psutil.Error:
        return True


def shared_interval(ranks: int) -> float:
    """Seconds between two turns of a rank: half a second up to 250 ranks, 16 s at 8,192."""
    return max(_SHORTEST, ranks / _TURNS)


_COLLECTIVE_ERROR = re.compile(r"gloo|nccl|c10d|ProcessGroup|TCPStore|collective", re.IGNORECASE)


@dataclass(frozen=True)
class FailureDiagnosis:
    """The ranks that caused the failure, their hosts, and the evidence in one line."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    step: int
    reason: str


def classify_error(error: BaseException) -> str:
    """`cut` for an exception that another rank caused (a collective that timed out or lost its peer), else `failed`."""
    kind = type(error)
    return "cut" if _COLLECTIVE_ERROR.search(f"{kind.__module__}.{kind.__name__} {error}") else "failed"


def diagnose_failure(beats: Sequence[Beat], asked: Collection[tuple[int, int]] = ()) -> FailureDiagnosis | None:
    """The cause of a failure, from the last heartbeats of all ranks; None if all ranks ended regularly.

    `asked`: rank and process of those that their agent had asked to end, because of another one.
    """
    if all(beat.state == "left" for beat in beats):
        return None
    failed = [beat for beat in beats if beat.state == "failed"]
    if failed:
        return _diagnosis(failed, "; ".join(f"{_who(beat)} failed at step {beat.step}: {beat.reason}" for beat in failed[:3]))
    waiting = [beat for beat in beats if beat.state == "cut"]
    missing = _missing(beats, waiting, asked)
    if not missing:
        cause = f"{_who(waiting[0])}: {waiting[0].reason}" if waiting else "all ended at once (the machine, the launcher or the scheduler)"
        return _diagnosis(waiting or beats, f"no rank was missing from a collective; {cause}")
    return _diagnosis(missing, "; ".join(_describe(beat, waiting) for beat in missing[:3]) + _where(missing[0], waiting))


def _diagnosis(beats: Sequence[Beat], reason: str) -> FailureDiagnosis:
    hosts = tuple(dict.fromkeys(beat.host for beat in beats))
    return FailureDiagnosis(tuple(beat.rank for beat in beats), hosts, max(beat.step for beat in beats), " ".join(reason.split()))


def _missing(beats: Sequence[Beat], waiting: Sequence[Beat], asked: Collection[tuple[int, int]]) -> list[Beat]:
    """The ranks that had not entered a collective in which others timed out. A rank that reported nothing is missing from all.

    A rank that waited in another collective is not reported as missing; the rank that was in no collective is. Of ranks that reported
    nothing, those that were asked to end are not reported if another one ended unasked: they may have had no time to notice its end.
    """
    silent = [beat for beat in beats if beat.state == "running"]
    silent = [beat for beat in silent if (beat.rank, beat.pid) not in asked] or silent
    if silent or not waiting:
        return silent if waiting or len(silent) < len(beats) else []
    first_timeout = min(beat.seen for beat in waiting)
    late = [beat for beat in beats if any(_is_late(beat, other, first_timeout) for other in waiting if other is not beat)]
    return [beat for beat in late if not _waits(beat, beats)] or late


def _is_late(beat: Beat, other: Beat, first_timeout: float) -> bool:
    """Whether the rank had not entered the collective of the other rank when the first rank timed out."""
    group = _last_group(other)
    mine = beat.entered.get(group) if group else None
    return mine is not None and group is not None and (mine.number < other.entered[group].number or mine.time > first_timeout)


def _waits(beat: Beat, beats: Sequence[Beat]) -> bool:
    """Whether the rank is in a collective that another rank has not entered."""
    group = _last_group(beat)
    return group is not None and any(
        other.entered[group].number < beat.entered[group].number for other in beats if other is not beat and group in other.entered
    )


def _last_group(beat: Beat) -> str | None:
    """The process group of the collective that the rank entered last."""
    return max(beat.entered, key=lambda group: beat.entered[group].time, default=None)


def _who(beat: Beat) -> str:
    return f"rank {beat.rank} on {beat.host} (process {beat.pid})"


def _describe(beat: Beat, waiting: Sequence[Beat]) -> str:
    if beat.state == "running":
        hung = any("timed out" in other.reason.lower() for other in waiting)
        what = "stopped responding (frozen, or its machine is down)" if hung else "ended without an error message (perhaps out of memory)"
        return f"{_who(beat)} {what}; its last heartbeat was at step {beat.step} ({beat.doing})"
    busy = beat.seen - beat.time
    return f"{_who(beat)} was alive but did not enter the collective: it had been at step {beat.step} ({beat.doing}) for {busy:.0f} s"


def _where(missing: Beat, waiting: Sequence[Beat]) -> str:
    for beat in waiting:
        group = _last_group(beat)
        if group and (missing.state == "running" or group in missing.entered):
            last = beat.entered[group]
            ranks = [str(other.rank) for other in waiting if other.entered.get(group, last).number == last.number]
            who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
            return f"; missing from {last.name} number {last.number} of group {group}, where {who} waited"
    return ""
