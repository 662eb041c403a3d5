"""The ledger: an append-only log of the events of a run; and the lock that lets one process write to a run directory.

The data that a run skips after a rollback is derived from the ledger, without state of its own (promise 1). A rollback restores the weights
of an earlier step, trains the steps up to `skip[0]` again, and continues with step `skip[1]`. Step numbers do not change: the batch, the
learning rate and the phase of a step are the same as without a rollback. The data order therefore stays valid, the run ends at the planned
step, and the skipped data is never trained on.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.io import jsonl
from lmworks.io.files import explain_full_disk, explain_os_errors, try_lock
from lmworks.io.jsonl import ClosesAtEnd, Waiting
from lmworks.io.masking import map_strings, mask

LEDGER = "ledger.jsonl"
LOCK, LAUNCH_LOCK = "lock", "launch/lock"
START_OVER = "start_over"
_PROBE = 0.2  # seconds to take a lock: who looks whether a run is in use (`require_free`) holds it for a moment
_listeners: list[Callable[[Path, Mapping[str, Any]], None]] = []


@contextmanager
def listening(listener: Callable[[Path, Mapping[str, Any]], None]) -> Iterator[None]:
    """Within the block `listener` is called with the file and the line of every event that this process writes, before it is written: also
    of those that a full disk keeps out."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Ledger(ClosesAtEnd):
    """Append-only lines `{"time": seconds since 1970, "event": name, ...}`, each synced to disk when `write` returns.

    Threads may share a ledger. It does not make its directory, which may have been moved away. Opening it truncates an incomplete last
    line, which a killed process can leave. With `patient`, a line that cannot be written, as on a full disk, waits in memory: later writes,
    `flush` and `close` try again, and only the last two raise.
    """

    def __init__(self, path: Path, patient: bool = False) -> None:
        self.path = Path(path)
        self._lock, self._waiting = threading.Lock(), Waiting() if patient else None
        with explain_os_errors(self.path):
            self._fd = jsonl.open_append(self.path)

    def write(self, event: str, **fields: Any) -> None:
        """Append one line. `fields` are JSON values; paths become strings, non-finite numbers become null."""
        record = {"time": round(time.time(), 3), "event": event, **map_strings(fields, mask)}
        for listener in list(_listeners):
            listener(self.path, record)
        with self._lock, explain_os_errors(self.path):
            if self._waiting is not None:
                self._waiting.append(self._fd, record)
                with suppress(OSError):
                    os.fsync(self._fd)
                return
            jsonl.append(self._fd, record)
            os.fsync(self._fd)

    def flush(self) -> None:
        """Write and sync the lines that wait. Raises `UserError` or `OSError` if that is not possible."""
        with self._lock, explain_os_errors(self.path):
            if self._waiting is not None and self._fd >= 0:
                self._waiting.drain(self._fd)
                os.fsync(self._fd)

    def read(self) -> list[dict[str, Any]]:
        """All lines so far, oldest first."""
        return read_ledger(self.path) + (self._waiting.records if self._waiting is not None else [])

    def close(self) -> None:
        """Close the file; a closed ledger can still be read."""
        try:
            self.flush()
        finally:
            with self._lock:
                if self._fd >= 0:
                    os.close(self._fd)
                    self._fd = -1


class NoLedger(Ledger):
    """Discards all events: on ranks other than 0, which do not write the ledger."""

    def __init__(self) -> None:
        self._fd, self._lock, self._waiting = -1, threading.Lock(), None

    def write(self, event: str, **fields: Any) -> None:
        return

    def flush(self) -> None:
        return

    def read(self) -> list[dict[str, Any]]:
        return []


def since_start_over(lines: Iterable[Mapping[str, Any]], stage: str) -> list[Mapping[str, Any]]:
    """The lines of a ledger after the last start over of a stage: a run whose checkpoints were deleted begins again at step 0, and what
    was decided about the steps of its former course no longer holds."""
    found: list[Mapping[str, Any]] = []
    for line in lines:
        found.append(line)
        if line["event"] == START_OVER and line.get("stage") == stage:
            found.clear()
    return found


def events_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """The events of this name in the ledger of a run, oldest first; none if it has no ledger yet."""
    path = run_dir / LEDGER
    return [event for event in read_ledger(path) if event["event"] == name] if path.exists() else []


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger, which another process may be writing. Raises `UserError` for a line without an event name."""
    events = jsonl.read(path)
    for number, event in enumerate(events, 1):
        if not isinstance(event.get("event"), str):
            raise UserError(f"{path}: line {number} has no event name; delete that line")
    return events


ROLLBACK = "rollback"
_OF_BATCHES = ("bad_step", "not_finite", "spike", "spike_accepted", "corruption", "stopped")  # events whose step counts from 0


def shown_step(event: Mapping[str, Any]) -> int | None:
    """The step of an event as metrics and charts count it: line 1 is the first step. Faults are recorded with the number of the batch,
    which counts from 0; that of a rollback too, unless somebody has asked for it. None without a step."""
    step = event.get("step")
    of_batch = event.get("event") in _OF_BATCHES or (event.get("event") == ROLLBACK and bool(event.get("reason")))
    return step + of_batch if isinstance(step, int) else None


def skipped_steps(skip: Sequence[int] | None) -> str:
    """The words for steps [skip[0], skip[1]) behind a rollback, counted as by `shown_step`; empty if none are skipped."""
    return f", without the data of steps {skip[0] + 1:,} to {skip[1]:,}" if skip else ""


GREW = "batch_grew"


@dataclass(frozen=True)
class Rollback:
    """`step` is the last step that was begun, `to_step` that of the checkpoint; steps [skip[0], skip[1]) are skipped from then on.
    `reason` is empty if a user requested it."""

    step: int
    to_step: int
    skip: tuple[int, int] | None = None
    reason: str = ""


def rollbacks(lines: Iterable[Mapping[str, Any]], stage: str) -> list[Rollback]:
    """The rollbacks of a stage since it last started over, from the lines of a ledger, oldest first."""
    found = []
    for line in since_start_over(lines, stage):
        if line["event"] == ROLLBACK and line.get("stage", "pretrain") == stage:
            skip = line.get("skip")
            found.append(Rollback(line["step"], line["to_step"], skip and (int(skip[0]), int(skip[1])), line.get("reason") or ""))
    return found


def undone(step: int, known: int, history: Sequence[Rollback]) -> bool:
    """Whether a checkpoint of this step, saved after `known` rollbacks, was undone by a later rollback."""
    return any(step > one.to_step for one in history[known:])


class Skips:
    """The steps that are skipped, over all rollbacks so far."""

    def __init__(self, history: Iterable[Rollback]) -> None:
        self._windows: list[tuple[int, int]] = []
        for start, stop in sorted(one.skip for one in history if one.skip and one.skip[0] < one.skip[1]):
            if self._windows and start <= self._windows[-1][1]:
                self._windows[-1] = (self._windows[-1][0], max(stop, self._windows[-1][1]))
            else:
                self._windows.append((start, stop))

    @property
    def windows(self) -> list[tuple[int, int]]:
        """In ascending order; they neither overlap nor touch."""
        return list(self._windows)

    def __contains__(self, step: int) -> bool:
        return self.next(step) != step

    def next(self, step: int) -> int:
        """The first step from `step` on that is trained."""
        return next((stop for start, stop in self._windows if start <= step < stop), step)

    def until(self, step: int, end: int) -> int:
        """Where the steps without interruption from `step` on end: at the next skipped step, or at `end`."""
        return min([start for start, _ in self._windows if start >= step] + [end])

    def before(self, step: int) -> list[tuple[int, int]]:
        """The windows, clipped to the steps before `step`."""
        return [(start, min(stop, step)) for start, stop in self._windows if start < step]


class RunLock:
    """Holds `run_dir/lock` until `release`, the end of a `with` block, or the end of the process for any reason.

    Raises `UserError` that names the holder's process and machine, or says that the directory cannot be written; at the end of the block
    also in place of an error whose cause is that the directory is no longer there.
    The file is not removed: otherwise two processes could hold locks on two files of the same name.

    A launch holds another `file` of the run (`LAUNCH_LOCK`) for as long as it may start ranks, and only ranks get the lock meanwhile.
    `fd`: the open file of the process that started this one, which then holds the lock.
    """

    def __init__(self, run_dir: Path, file: str = LOCK, fd: int | None = None) -> None:
        self._run_dir, self.path = Path(run_dir), Path(run_dir) / file
        try:
            with explain_full_disk(run_dir):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644) if fd is None else os.dup(fd)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise UserError(f"cannot write {run_dir}: a part of it is not a directory; choose another run_dir") from None
        except OSError as error:  # names that are too long, special file systems, broken disks
            raise UserError(f"cannot write {run_dir}: {error.strerror}; make it writable, or choose another run_dir") from error
        try:
            until = time.monotonic() + _PROBE
            while not try_lock(self._fd):
                if time.monotonic() > until:
                    raise _in_use_by(run_dir, _holder(self._fd))
                time.sleep(0.01)
            if file == LOCK and "RANK" not in os.environ:
                require_free(self._run_dir, LAUNCH_LOCK)
        except UserError:
            os.close(self._fd)
            raise
        # A forked child shares the lock with its parent; a child that outlives it would keep the lock.
        os.register_at_fork(after_in_child=self._forget)
        with explain_os_errors(run_dir):
            os.ftruncate(self._fd, 0)
            pid = os.getpid() if fd is None else os.getppid()
            os.pwrite(self._fd, json.dumps({"pid": pid, "host": socket.gethostname(), "since": time.time()}).encode() + b"\n", 0)

    def release(self) -> None:
        """Release the lock. Releasing twice is allowed."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._forget()

    def _forget(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        gone = isinstance(error, OSError | UserError) and self._is_gone()
        self.release()
        if gone:
            what = f"{self._run_dir} was moved or deleted while it was in use"
            raise UserError(f"{what}; put it back, and give the command again") from error

    def _is_gone(self) -> bool:
        """Whether another file than the locked one, or none, has its name."""
        try:
            return self._fd >= 0 and not os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except OSError:
            return True


def in_use(run_dir: Path) -> bool:
    """Whether a process or a launch holds a run."""
    try:
        require_free(run_dir, LOCK)
        require_free(run_dir, LAUNCH_LOCK)
    except UserError:
        return True
    return False


def require_free(run_dir: Path, file: str) -> None:
    """Raise `UserError` if a process holds this lock of a run."""
    with suppress(FileNotFoundError, NotADirectoryError), open(run_dir / file, "rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # NFS locks a file for itself alone only if it is open for writing
        except BlockingIOError:
            raise _in_use_by(run_dir, _holder(handle.fileno())) from None


def _in_use_by(run_dir: Path, holder: Mapping[str, Any]) -> UserError:
    return UserError(
        f"{run_dir} is in use by process {holder.get('pid', '?')} on {holder.get('host', '?')}; "
        "wait for it, stop it, or choose another run_dir"
    )


def is_lock(path: Path) -> bool:
    """Whether a file is one of these locks, held or released."""
    with open(path, "rb") as handle:
        text = handle.read(4096)
    try:
        return not text or "pid" in json.loads(text)
    except (ValueError, TypeError):
        return False


def _holder(fd: int) -> dict[str, Any]:
    """The process and machine that the holder has written; empty if it has not written them yet."""
    try:
        return dict(json.loads(os.pread(fd, 4096, 0)))
    except ValueError:
        return {}
