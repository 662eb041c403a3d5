"""Starts the process that sends the alerts of a run, and tells it what the ledger is told.

`alerting` is entered by whoever runs a recipe: `lmworks run`, the first rank of a launch, the launcher, the end of a Slurm job. It writes
to a pipe that never blocks; a process that does not read its pipe, or has died, loses alerts and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.watch import stop_signals
from lmworks.watch.alert_process import Orders
from lmworks.watch.alert_targets import Target, open_target
from lmworks.watch.alerts import alert_of
from lmworks.watch.ledger import GREW, LEDGER, listening

COMMAND = [sys.executable, "-P", "-m", "lmworks.watch.alert_process"]
_MORE_PATIENCE = 10.0  # seconds that the process has to end, beside those of all attempts
_UNSETTLED = ("start", "start_over", "resume", "phase", "rollback", GREW)  # events after which a step may take longer than those before
_IDLE = ("finish", "run_ended")  # and those after which no step follows


@contextmanager
def alerting(recipe: Recipe, run_dir: Path, *, owner: bool, heartbeats: Path | None = None) -> Iterator[None]:
    """Within the block, alerts are sent to the targets of the recipe, and at its end those that wait; see `Orders` for `owner` and
    `heartbeats`. Targets that cannot be used here are left out: a run refuses them before its first stage."""
    targets = _usable(recipe)
    if not targets:
        yield
        return
    options = recipe.alerts
    orders = Orders(
        recipe.name, str(run_dir.absolute()), [asdict(one) for one in targets], float(options.repeat_after), float(options.timeout),
        options.attempts, options.stall_factor, float(options.stall_min), owner, str(heartbeats) if heartbeats else None, os.getpid(),
    )  # fmt: skip
    process = _Process(orders)
    ledger = (run_dir / LEDGER).absolute()

    def hear(path: Path, record: Mapping[str, Any]) -> None:
        if path.absolute() != ledger:
            return
        if (alert := alert_of(record)) is not None:
            process.tell({"alert": asdict(alert)})
        if (event := record["event"]) in _UNSETTLED:
            process.tell({"unsettled": True})
        elif event in _IDLE:
            process.tell({"idle": True})

    def stopping(name: str) -> None:
        process.tell({"stopping": name})

    try:
        with listening(hear), stop_signals.listening(stopping):
            yield
    finally:
        process.tell({"ended": True})
        process.close()


def _usable(recipe: Recipe) -> list[Target]:
    found = []
    for options in recipe.alerts.targets:
        with suppress(UserError):
            found.append(open_target(options))
    return found


class _Process:
    """The process beside the run."""

    def __init__(self, orders: Orders) -> None:
        self._patience = orders.patience + _MORE_PATIENCE
        self._process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        assert self._process.stdin is not None
        self._fd = self._process.stdin.fileno()
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asdict(orders)).encode() + b"\n")
            self._process.stdin.flush()
        os.set_blocking(self._fd, False)

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message that fits into one write, without waiting."""
        with suppress(OSError):  # it is gone, or does not read: no reason to disturb the run
            os.write(self._fd, json.dumps(message, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        """Let it send what waits, and end."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(self._patience)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
