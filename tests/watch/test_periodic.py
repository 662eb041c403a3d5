"""Rules of the doctor during training: in a process of its own, each cause once, and nothing that fails there ends a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmworks.io.jsonl import line
from lmworks.watch import periodic
from lmworks.watch.ledger import LEDGER, events_of
from lmworks.watch.periodic import PeriodicDiagnosis
from lmworks.watch.rule import Finding, Measurement, Rule
from patience import PATIENCE
from tiny_run import Tiny, before_each_step
from written_run import write_run

FULL = {"event": "save_failed", "step": 30, "reason": "No space left on device", "in_a_row": 1, "stage": "pretrain"}


def wait_for(condition: Any, seconds: float = PATIENCE) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def test_a_cause_is_reported_once(tmp_path: Path) -> None:
    run, told = write_run(tmp_path / "run", {"train/loss": [1.0] * 50}, [FULL]), []
    rounds = []
    diagnosis = PeriodicDiagnosis(run, "pretrain", 0.05, lambda event, **fields: told.append((event, fields)))
    honest = diagnosis._diagnose
    diagnosis._diagnose = lambda: rounds.append(found := honest()) or found  # type: ignore[method-assign]
    with diagnosis:
        assert wait_for(lambda: len(rounds) >= 3)
    assert all(rounds[:3]) and [(event, fields["code"], fields["step"]) for event, fields in told] == [("finding", "disk-full", 30)]


@pytest.mark.parametrize("command", [["/nowhere/python"], [sys.executable, "-c", "print('nothing')"], [sys.executable, "-c", "1/0"]])
def test_a_diagnosis_that_fails_is_tried_again(tmp_path: Path, command: list[str]) -> None:
    diagnosis = PeriodicDiagnosis(tmp_path, "pretrain", 0.05, lambda *_, **__: pytest.fail("nothing was found"))
    diagnosis._command = command
    with diagnosis:
        time.sleep(0.3)
        assert diagnosis._thread.is_alive()


def test_the_end_of_a_run_does_not_wait_for_a_diagnosis_that_hangs(tmp_path: Path) -> None:
    diagnosis = PeriodicDiagnosis(tmp_path, "pretrain", 0.01, lambda *_, **__: None)
    diagnosis._command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with diagnosis:
        assert wait_for(lambda: diagnosis._process is not None)
        process, began = diagnosis._process, time.monotonic()
    assert time.monotonic() - began < 10 and process is not None and process.wait(10) < 0


def test_a_diagnosis_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "_TIMEOUT", 0.1)
    diagnosis = PeriodicDiagnosis(tmp_path, "pretrain", None, lambda *_, **__: None)
    diagnosis._command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    assert diagnosis._diagnose() == []


def test_rules_that_judge_a_whole_run_wait_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = Finding((Measurement("a", 2.0, high=1.0),), exact=True)
    both = [Rule(code, "It is so.", "data", ("spikes",), lambda _: proof, "", cheap=code == "cheap") for code in ("cheap", "dear")]
    monkeypatch.setattr("lmworks.watch.diagnosis.all_rules", lambda: {one.code: one for one in both})
    monkeypatch.setattr(os, "nice", lambda more: 0)
    periodic.main(str(write_run(tmp_path / "run", {"train/loss": [1.0] * 5})), "pretrain")
    assert [one["code"] for one in json.loads(capsys.readouterr().out)] == ["cheap"]


def test_the_process_imports_no_torch_and_has_low_priority(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {"train/loss": [1.0] * 50})
    code = "import sys, os; from lmworks.watch.periodic import main; main(*sys.argv[1:]); print('torch' in sys.modules, os.nice(0))"
    command = [sys.executable, "-c", code, str(tmp_path / "run"), "pretrain"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == f"[]\nFalse {min(19, os.nice(0) + 19)}\n"


def test_a_run_judges_itself_while_it_trains(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_copy
    with open(run.run_dir / LEDGER, "ab") as file:
        file.write(line({"time": 1.0, **FULL}))
    before_each_step(monkeypatch, lambda step: wait_for(lambda: events_of(run.run_dir, periodic.FINDING)) if step == 8 else None)
    run.walk("metrics.diagnose_every=0.1 s", last="pretrain")
    assert [found["code"] for found in events_of(run.run_dir, periodic.FINDING)] == ["disk-full"]
