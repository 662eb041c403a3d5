"""A rank of a real run that is slow while there are three ranks, so that a fourth can rejoin before the run is over."""

from __future__ import annotations

import os
import runpy
import time

import pytest

from tiny_run import before_each_step

FROM, SECONDS = 14, 5.0


def slow_down(step: int) -> None:
    if step >= FROM and os.environ["WORLD_SIZE"] == "3":
        time.sleep(SECONDS)


if __name__ == "__main__":
    before_each_step(pytest.MonkeyPatch(), slow_down)
    runpy.run_module("lmworks.cli.rank", run_name="__main__")
