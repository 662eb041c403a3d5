"""A rank of a launched run with the fault that LMWORKS_DOCTOR_FAULT names; `scenarios.ranks` starts it in place of `lmworks.cli.rank`."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import hooks

SLOW_FROM = 120  # of two ranks each is compared with its own past: five comparisons, one every twenty steps
_KEPT: list[bytearray] = []
_RUNS = 0.002  # seconds between two stops: less than the computation by which ranks are compared takes
_PACE = """
import os, signal, sys, time
rank, runs, stops = os.getppid(), *map(float, sys.argv[1:])
while os.getppid() == rank:
    os.kill(rank, signal.SIGSTOP)
    time.sleep(stops)
    os.kill(rank, signal.SIGCONT)
    time.sleep(runs)
"""


def pace(factor: float) -> None:
    """From now on this process takes `factor` times as long for everything, as on a processor whose clock was lowered."""
    subprocess.Popen([sys.executable, "-c", _PACE, str(_RUNS), str(_RUNS * (factor - 1))])


def plant(kind: str, dose: int) -> None:
    """The second rank becomes slow or is so from the start, or, from step 12 on, stops, is killed, or needs ever more memory."""

    def act(step: int, model: Any) -> None:
        if (kind, step) in (("slow", SLOW_FROM), ("slow from the start", 0)):
            pace((1.5, 3.0, 6.0)[dose])
        elif kind == "hung" and step == (30, 20, 12)[dose]:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "dead" and step == (30, 20, 12)[dose]:
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "oom" and step >= 12:
            _KEPT.append(bytearray(os.urandom(1)) * ((60, 100, 200)[dose] << 20))

    hooks.before_each_step(act)


if __name__ == "__main__":
    fault = json.loads(os.environ["LMWORKS_DOCTOR_FAULT"])
    events = Path(fault["ledger"]).read_text(encoding="utf-8").splitlines()
    restarted = any(json.loads(line)["event"] == "start" for line in events)  # this is not the first start
    if os.environ["RANK"] == "1" and (fault["kind"].startswith("slow") or not restarted):
        plant(fault["kind"], fault["dose"])
    runpy.run_module("lmworks.cli.rank", run_name="__main__")
