"""The process that sends the alerts of a run: `python -m lmworks.watch.alert_process`, started by `lmworks.watch.alerting`.

It is a process of its own, so that a slow target delays no step, a training process that hangs is noticed, and one that is killed is
reported. It reads lines of JSON from standard input, the first of which is its `Orders` with the credentials of the targets: these are
never in its arguments, in a file, or in what it writes. It ends when standard input closes or its parent is gone, after it has sent what
waits.

What was sent is in the ledger (`alert_sent`, `alert_failed`), from which a process that is started again knows what not to repeat.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.watch.alert_targets import NotDelivered, Target
from lmworks.watch.alerts import RUN_ENDED, Alert, alert_of, body
from lmworks.watch.heartbeat import read_local_beats, recover_beats
from lmworks.watch.ledger import LEDGER, Ledger, read_ledger
from lmworks.watch.stall import StallMonitor

_POLL = 0.5  # seconds
_RETRY_FAILED = 600.0  # seconds after which a cause whose alert could not be delivered is tried again
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # they are meant for the run, whose end is still to be reported


@dataclass(frozen=True)
class Orders:
    """The first line. `owner`: this process reports the end of the run where its parent is killed; `heartbeats`: the folder of those of the
    parent, which is then watched for stalls."""

    run: str
    run_dir: str
    targets: list[dict[str, Any]]
    repeat_after: float
    timeout: float
    attempts: int
    stall_factor: float
    stall_min: float
    owner: bool
    heartbeats: str | None
    parent: int

    @property
    def patience(self) -> float:
        """Seconds in which all attempts of an alert are over."""
        return self.attempts * self.timeout + 2.0**self.attempts


class Dispatcher:
    """Sends each alert to the targets that want it, unless they had one of the same cause; a thread for each target."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._run_dir = orders, Path(orders.run_dir)
        self._handled: dict[tuple[str, str], float] = {}
        self._ledger: Ledger | None = None
        self._queues: dict[str, queue.Queue[Alert]] = {}
        self._targets = [Target(**one | {"on": tuple(one["on"]), "command": tuple(one["command"])}) for one in orders.targets]
        for target in self._targets:
            self._queues[target.name] = queue.Queue()
            threading.Thread(target=self._work, args=(target,), daemon=True, name=target.name).start()

    def send(self, alert: Alert) -> None:
        for target in self._targets:
            if target.wants(alert.kind) and not self._is_repeated(target.name, alert):
                self._handled[target.name, alert.cause] = time.time()
                self._queues[target.name].put(alert)

    def _is_repeated(self, target: str, alert: Alert) -> bool:
        def recent(when: float, within: float) -> bool:
            return time.time() - within < when <= time.time() + 60  # a clock that was set back makes no alert wait for it

        if recent(self._handled.get((target, alert.cause), 0.0), self._orders.repeat_after):
            return True
        for line in reversed(self.lines()):
            if line.get("target") == target and line.get("cause") == alert.cause:
                if line["event"] == "alert_sent" and recent(line["time"], self._orders.repeat_after):
                    return True
                if line["event"] == "alert_failed" and recent(line["time"], min(_RETRY_FAILED, self._orders.repeat_after)):
                    return True
        return False

    def lines(self) -> list[dict[str, Any]]:
        try:
            return read_ledger(self._run_dir / LEDGER)
        except (UserError, OSError):
            return []

    def write(self, event: str, **fields: Any) -> None:
        """A line of the ledger; on a full disk it waits in memory."""
        with suppress(UserError, OSError):
            if self._ledger is None:
                self._ledger = Ledger(self._run_dir / LEDGER, patient=True)
            self._ledger.write(event, **fields)

    def _work(self, target: Target) -> None:
        orders = self._orders
        while True:
            alert = self._queues[target.name].get()
            about = {"target": target.name, "kind": alert.kind, "cause": alert.cause}
            try:
                content = body(alert, orders.run, self._run_dir, target.form)
                attempts = target.deliver_patiently(content, orders.timeout, orders.attempts)
                self.write("alert_sent", **about, attempts=attempts)
            except NotDelivered as failure:
                self._failed(about, str(failure))
            except Exception as error:  # of a library; its text may hold what it was given
                self._failed(about, type(error).__name__)
            finally:
                self._queues[target.name].task_done()

    def _failed(self, about: Mapping[str, str], reason: str) -> None:
        self._handled[about["target"], about["cause"]] = (
            time.time() - self._orders.repeat_after + min(_RETRY_FAILED, self._orders.repeat_after)
        )
        self.write("alert_failed", **about, reason=reason)

    def drain(self) -> None:
        """Wait until everything is sent or has failed; what has not ended then counts as failed."""
        until = time.monotonic() + self._orders.patience
        for name, waiting in self._queues.items():
            while waiting.unfinished_tasks and time.monotonic() < until:
                time.sleep(0.02)
            if waiting.unfinished_tasks:
                self.write("alert_failed", target=name, kind="", cause="", reason="it does not answer")
        if self._ledger is not None:
            with suppress(UserError, OSError):
                self._ledger.flush()


class Watch:
    """Follows the run: its messages, its heartbeats, and whether it is still there."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._dispatcher = orders, Dispatcher(orders)
        self._stalls = StallMonitor(orders.stall_factor, orders.stall_min)
        self._ended, self._stopping = False, ""

    def run(self, messages: Iterator[dict[str, Any] | None]) -> None:
        """Handle messages until they end; None stands for a moment without one."""
        for message in messages:
            if message is not None:
                self._handle(message)
            self._look()
        if self._orders.owner and not self._ended:
            self._report_killed()
            if self._orders.heartbeats is not None:  # its last one would stay in memory
                recover_beats(Path(self._orders.heartbeats), Path(self._orders.heartbeats))
        self._dispatcher.drain()

    def _handle(self, message: Mapping[str, Any]) -> None:
        if "alert" in message:
            alert = Alert(**message["alert"])
            self._ended = self._ended or "outcome" in alert.fields
            self._dispatcher.send(alert)
        elif message.get("ended"):
            self._ended = True
        elif "stopping" in message:
            self._stopping = str(message["stopping"])
        elif message.get("idle"):
            self._stalls.idle()
        elif message.get("unsettled"):
            self._stalls.unsettle()

    def _look(self) -> None:
        """Look whether training stands still."""
        if self._orders.heartbeats is None:
            return
        beat = next((one for one in read_local_beats(Path(self._orders.heartbeats)) if one.pid == self._orders.parent), None)
        if beat is None or beat.state != "running":
            return
        if (stall := self._stalls.observe(beat, time.monotonic())) is not None:
            self._emit("stall", **stall.fields())

    def _emit(self, event: str, **fields: Any) -> None:
        """Write an event that nobody else can write, and send its alert."""
        self._dispatcher.write(event, **fields)
        if (alert := alert_of({"time": time.time(), "event": event, **fields})) is not None:
            self._dispatcher.send(alert)

    def _report_killed(self) -> None:
        stopped = self._stopping == signal.SIGINT.name
        reason = f"process {self._orders.parent} ended without a last word, as when it is killed with SIGKILL or memory runs out"
        if self._stopping:
            reason = f"process {self._orders.parent} was killed after {self._stopping}, before it had saved"
        self._emit(RUN_ENDED, outcome="stopped" if stopped else "failed", code=None, reason=reason, process=self._orders.parent)


def messages_of(fd: int, parent: int) -> Iterator[dict[str, Any] | None]:
    """The lines of a pipe, and None where none has come for a while. Ends when it closes or the parent is gone: a process that the parent
    has forked may hold the pipe longer than the parent lives."""
    rest = b""
    while True:
        if select.select([fd], [], [], _POLL)[0]:
            block = os.read(fd, 1 << 16)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                with suppress(ValueError):
                    yield json.loads(line)
            if not block:
                return
        elif os.getppid() != parent:
            return
        yield None


def main() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.raw.readline() if hasattr(sys.stdin.buffer, "raw") else sys.stdin.buffer.readline()
    orders = Orders(**json.loads(line))
    Watch(orders).run(messages_of(0, orders.parent))
    os._exit(0)  # a thread may still wait for a target


if __name__ == "__main__":
    main()
