"""`torchrun` that records how each rank has ended: `python -m lmworks.launch.agent`, with the arguments of `torch.distributed.run`.

The agent is the parent of the ranks of its node, so the kernel tells it, and nobody else, with which code or by which signal one has ended,
also by SIGKILL and by the OOM killer. It also asks its ranks to end, by signals, once one of them has failed or other nodes leave or join:
a rank that ends after that was `asked`, and is not the cause. Every end with another code than 0 is a line of launch/exits/HOST.jsonl. The
first rank writes these lines to the ledger after a restart, and the launcher when it ends: events `rank_exit`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.host.counters import oom_kills
from lmworks.io import jsonl
from lmworks.launch.launch_dir import VARIABLE, LaunchDir
from lmworks.watch.heartbeat import HOST
from lmworks.watch.ledger import LEDGER, Ledger

EVENT = "rank_exit"
_MOST = 10_000  # ends of ranks that are written to a ledger at a time


class _Rank(subprocess.Popen[Any]):
    """A process that the agent starts; the end of one that has a rank is recorded by whoever asks first."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self._kills, self._recorded, self.asked = oom_kills(), False, False
        self._rank = (options.get("env") or {}).get("RANK")
        super().__init__(*given, **options)

    def poll(self) -> int | None:
        code = super().poll()
        self._record()
        return code

    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        self._record()
        return code

    def _record(self) -> None:
        code = self.returncode
        if self._rank is None or self._recorded or code is None:
            return
        self._recorded = True
        if code:
            now = oom_kills()
            killed = None if now is None or self._kills is None else now > self._kills
            found = describe_exit(int(self._rank), os.environ.get(HOST, ""), self.pid, code)
            _append(found | {"asked": self.asked, "oom_kill": killed})


def describe_exit(rank: int, host: str, pid: int, code: int) -> dict[str, Any]:
    """The fields of a `rank_exit`, from a return code of `subprocess`: -N for signal N, whose name is `signal`, otherwise None."""
    name = None
    if code < 0:
        with suppress(ValueError):
            name = signal.Signals(-code).name
    return {"rank": rank, "host": host, "pid": pid, "code": code, "signal": name, "ended": round(time.time(), 3)}


def _append(record: dict[str, Any]) -> None:
    """Best effort: a full disk does not end the agent."""
    folder = LaunchDir(Path(os.environ[VARIABLE])).exits
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / f"{record['host'].replace('/', '_')}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(fd, jsonl.line(record))
        finally:
            os.close(fd)


def report_exits(folder: LaunchDir, run_dir: Path) -> list[dict[str, Any]]:
    """Write the recorded ends of ranks to the ledger of the run, in order, forget them, and return them; called while no rank writes that
    file, and all ranks of the agents have ended. A file that is damaged is left out."""
    found: list[dict[str, Any]] = []
    paths = sorted(folder.exits.glob("*.jsonl"))
    for path in paths:
        with suppress(UserError, OSError):
            found += [one for one in jsonl.read(path)[-_MOST:] if isinstance(one.get("ended"), int | float)]
    found.sort(key=lambda one: one["ended"])
    if found:
        with Ledger(run_dir / LEDGER, patient=True) as ledger:
            for one in found:
                ledger.write(EVENT, **one)
    for path in paths:
        path.unlink(missing_ok=True)
    return found


def main() -> None:
    subprocess.Popen = _Rank  # type: ignore[misc]  # before torch imports the name
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.run import main as torchrun

    send = SubprocessHandler.close

    def ask(handler: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
        assert isinstance(handler.proc, _Rank)
        handler.proc.asked = True
        send(handler, death_sig)

    SubprocessHandler.close = ask  # type: ignore[method-assign, assignment]
    torchrun()


if __name__ == "__main__":
    main()
