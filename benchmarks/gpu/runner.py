"""Runs checks one after another, each in a process of its own, and writes what they find as JSON lines, at once.

A check is a generator of rows. Each row is a line of the report the moment it is known, so that a machine that is taken away in the middle
has told what it knew. A check that raises, hangs or breaks the device ends alone: it runs in a fork of this process, which has imported
torch but has never touched the device.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_POLL = 0.1  # seconds
_TOY = 4  # times the limit of a check at a small size, which is made beside other programs: compiling for 18 s alone took 120 s


@dataclass(frozen=True)
class Check:
    """`run(toy)` yields the rows; `toy` sizes run on a CPU in seconds. `seconds`: when it is ended."""

    name: str
    run: Callable[[bool], Iterator[Row]]
    seconds: float


class Report:
    """JSON lines on the standard output and in a file, each written through to the disk."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._began = time.monotonic()

    def write(self, check: str, row: Row) -> None:
        line = json.dumps({"check": check, "at": round(time.monotonic() - self._began, 2)} | plain(row)) + "\n"
        os.write(self._file, line.encode())
        os.fsync(self._file)
        sys.stdout.write(line)
        sys.stdout.flush()


def plain(value: Any) -> Any:
    """A value as JSON has it: floats with six digits, everything unknown as text."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < float("inf") else str(value)
    return value if isinstance(value, str | int | bool) or value is None else str(value)


def run(checks: Sequence[Check], report: Report, toy: bool, seconds: float) -> list[str]:
    """Run the checks, as far as they begin within `seconds`; returns the names of those that failed or did not begin."""
    until, failed = time.monotonic() + seconds, []
    for check in checks:
        left = until - time.monotonic()
        if left <= 0:
            report.write(check.name, {"ok": False, "error": "not begun: the time is over"})
        elif _run_apart(check, report, toy, min(check.seconds * (_TOY if toy else 1), left)):
            continue
        failed.append(check.name)
    return failed


def _run_apart(check: Check, report: Report, toy: bool, seconds: float) -> bool:
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _in_child(check, report, toy)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        took = time.monotonic() - began
        if done:
            break
        if took > seconds:
            os.killpg(child, signal.SIGKILL)  # with what it has started
            os.waitpid(child, 0)
            report.write(check.name, {"ok": False, "seconds": took, "error": f"no end after {seconds:.0f} s"})
            return False
        time.sleep(_POLL)
    code = os.waitstatus_to_exitcode(status)
    if code != 1:  # 1: it has said why
        report.write(check.name, {"ok": code == 0, "seconds": took} | ({} if code == 0 else {"error": f"ended with {code}"}))
    return code == 0


def _in_child(check: Check, report: Report, toy: bool) -> None:
    """The rest of the life of the forked process."""
    code, began = 1, time.monotonic()
    try:
        os.setpgid(0, 0)
        for row in check.run(toy):
            report.write(check.name, row)
        code = 0
    except BaseException as error:
        said = {"ok": False, "seconds": time.monotonic() - began, "error": f"{type(error).__name__}: {error}"[:2000]}
        report.write(check.name, said | {"where": traceback.format_exc().splitlines()[-12:]})
    finally:
        sys.stdout.flush()
        os._exit(code)
