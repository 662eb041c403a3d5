"""The ledger: an append-only log of the events of a run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmworks import jsonl
from lmworks.errors import UserError
from lmworks.files import explain_os_errors
from lmworks.masking import map_strings, mask

LEDGER = "ledger.jsonl"
START_OVER = "start_over"


class Ledger:
    """Append-only lines `{"time": seconds since 1970, "event": name, ...}`, each synced to disk when `write` returns.

    Threads may share a ledger. Opening it truncates an incomplete last line, which a killed process can leave.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        with explain_os_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = jsonl.open_append(self.path)

    def write(self, event: str, **fields: Any) -> None:
        """Append one line. `fields` are JSON values; paths become strings, non-finite numbers become null."""
        with self._lock, explain_os_errors(self.path):
            jsonl.append(self._fd, {"time": round(time.time(), 3), "event": event, **map_strings(fields, mask)})
            os.fsync(self._fd)

    def read(self) -> list[dict[str, Any]]:
        """All lines so far, oldest first."""
        return read_ledger(self.path)

    def close(self) -> None:
        """Close the file; a closed ledger can still be read."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NoLedger(Ledger):
    """Discards all events: on ranks other than 0, which do not write the ledger."""

    def __init__(self) -> None:
        self._fd, self._lock = -1, threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
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
