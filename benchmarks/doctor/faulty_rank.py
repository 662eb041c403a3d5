"""A rank of a launched run with the fault that LMWORKS_DOCTOR_FAULT names; `scenarios.ranks` starts it in place of `lmworks.cli.rank`."""

from __future__ import annotations

import json
import os
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import hooks

_KEPT: list[bytearray] = []


def plant(kind: str, dose: int) -> None:
    """The second rank, from step 12 on: takes longer, stops, is killed, or needs ever more memory."""

    def act(step: int, model: Any) -> None:
        if kind == "slow" and step >= 12:
            time.sleep((0.1, 0.3, 1.0)[dose])
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
    if os.environ["RANK"] == "1" and (fault["kind"] == "slow" or not restarted):
        plant(fault["kind"], fault["dose"])
    runpy.run_module("lmworks.cli.rank", run_name="__main__")
