"""The ledger: an append-only log of the events of a run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmworks import jsonl
from lmworks.errors import UserError
from lmworks.files import explain_os_errors
from lmworks.jsonl import ClosesAtEnd, Waiting
from lmworks.masking import map_strings, mask

LEDGER = "ledger.jsonl"
START_OVER = "start_over"


class Ledger(ClosesAtEnd):
    """Append-only lines `{"time": seconds since 1970, "event": name, ...}`, each synced to disk when `write` returns.

    Threads may share a ledger. Opening it truncates an incomplete last line, which a killed process can leave. With `patient`, a line that
    cannot be written, as on a full disk, waits in memory: later writes, `flush` and `close` try again, and only the last two raise.
    """

    def __init__(self, path: Path, patient: bool = False) -> None:
        self.path = Path(path)
        self._lock, self._waiting = threading.Lock(), Waiting() if patient else None
        with explain_os_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = jsonl.open_append(self.path)

    def write(self, event: str, **fields: Any) -> None:
        """Append one line. `fields` are JSON values; paths become strings, non-finite numbers become null."""
        record = {"time": round(time.time(), 3), "event": event, **map_strings(fields, mask)}
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
