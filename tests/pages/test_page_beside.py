"""The page of a run while it goes on, and after its end, whatever that was."""

from __future__ import annotations

import io
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

import written_run
from lmworks.pages import beside
from lmworks.pages.beside import page_kept_new
from lmworks.run import runner
from lmworks.watch.ledger import RunLock
from patience import PATIENCE
from tiny_run import Tiny


def state(run_dir: Path) -> str:
    found = re.search(r'<p class="state ([\w-]+)">', (run_dir / "report.html").read_text(encoding="utf-8"))
    assert found
    return found[1]


def test_it_is_written_while_the_run_goes_on_and_when_it_has_given_up_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written_run.write_run(tmp_path / "run", {"train/loss": [1.0]})
    monkeypatch.setattr(beside, "_FIRST", 0.0)
    with page_kept_new(run), RunLock(run):
        until = time.monotonic() + PATIENCE
        while not (run / "report.html").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        assert state(run) == "running"
    assert state(run) == "stopped"


def test_a_killed_run_gets_a_last_page_and_all_cost_a_hundredth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used, waited, written = [0.0], list[float](), list[list[str]]()
    monkeypatch.setattr(beside, "_used", lambda: used[0])

    def write() -> None:
        used[0] += 7.0

    beside.repeat(write, lambda seconds: not waited.append(seconds) and len(waited) == 3)  # type: ignore[func-returns-value]
    assert (waited, used) == ([700.0] * 3, [28.0])
    monkeypatch.setattr(subprocess, "run", written.append)
    monkeypatch.setattr(os, "nice", lambda by: 0)
    reading, writing = os.pipe()
    os.close(writing)  # as when the process that held it was killed
    with io.TextIOWrapper(io.FileIO(reading), encoding="utf-8") as ended:
        monkeypatch.setattr("sys.stdin", ended)
        beside.main(str(tmp_path))
    assert written == [[*beside.COMMAND, str(tmp_path), "once"]] * 2


def test_a_run_that_ends_by_an_error_of_ours_is_not_shown_as_running(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(runner, "record_prediction", fail)
    (tiny_copy.run_dir / "report.html").unlink(missing_ok=True)
    with pytest.raises(ZeroDivisionError):
        tiny_copy.walk(last="pretrain")
    assert state(tiny_copy.run_dir) == "stopped"
