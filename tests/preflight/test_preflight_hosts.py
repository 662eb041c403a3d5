"""Preflight of hosts: their health, and one that is lost in a small run and replaced."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lmworks.cli.main import main
from lmworks.health.report import Checked, Report, Result, Status
from lmworks.launch.torchrun import Host
from lmworks.preflight import checks, hosts
from lmworks.preflight.check_result import CheckContext
from lmworks.preflight.host_rank import LOSSES, STEPS
from lmworks.ui.exit_codes import ExitCode
from lmworks.watch.ledger import Ledger
from node_recording import record
from tiny_run import Tiny


def report(host: str, status: Status, text: str = "fine") -> Report:
    checks = [Checked("write", "write test", Result(status, text)), Checked("dcgm", "diagnostics", Result("skip", "none"))]
    return Report(host, 1.0, 2.0, checks)


@pytest.mark.parametrize(
    ("status", "result", "said"),
    [
        ("ok", "ok", "2 checks of 2 hosts, 2 do not apply to them"),
        ("warn", "warn", "n2: write test: slow"),
        ("unknown", "warn", "n2: write test: slow"),
        ("fail", "fail", "n2: write test: slow"),
    ],
)
def test_a_host_that_is_not_healthy_is_named(status: Status, result: str, said: str) -> None:
    found = hosts.of_reports({"n1": report("n1", "ok"), "n2": report("n2", status, "slow")})
    assert found.result == result and said in found.text and bool(found.advice) == (result != "ok")


def test_this_machine_is_checked_by_the_command(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = record(tmp_path / "recording", tmp_path)
    (root / "sys/class/infiniband/mlx5_2/ports/1/rate").write_text("200 Gb/sec (4X HDR)")
    monkeypatch.setenv("LMWORKS_MACHINE", f"recorded={root}")
    found = hosts.healthy(CheckContext(tiny.resolve(f"run_dir={tmp_path}/run").recipe))
    assert found.result == "fail" and "mlx5_2/1 runs at 200 Gb/s, others at 400" in found.text
    assert not (tmp_path / "run").exists()


def test_what_is_missing_for_the_rehearsal_is_said(tiny: Tiny) -> None:
    context = CheckContext(tiny.resolve().recipe, name="tiny.yaml")
    found = hosts.replaced(context)
    assert found.result == "skip" and "lmworks preflight tiny.yaml --hosts FILE" in found.advice
    found = hosts.replaced(replace(context, hosts=[Host("a", 1), Host("b", 1)]))
    assert found.result == "skip" and "2 hosts are too few" in found.text


@pytest.mark.parametrize(("machine", "seconds"), [("a", 20.0), ("b", 3620.0)])
def test_the_gap_is_timed_by_a_clock_that_is_never_set(
    machine: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the first rank stays on its machine; another one has a clock of its own. The time is set by an hour in the gap."""
    monkeypatch.setattr(hosts.small_model, "run_ranks", lambda *given: [[2.0] * STEPS])
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.write("host_excluded", host="n1", reason="lost")
        ledger.write("host_started", host="n2")
    lines = [
        {"step": step, "loss": 2.0, "ranks": 2, "pid": 1 + late, "machine": machine if late else "a", "clock": 20.0 * late,
         "time": 1e9 + 3620 * late}
        for step in range(STEPS) for late in [step > STEPS // 2]
    ]  # fmt: skip
    (tmp_path / LOSSES).write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = hosts._judged("", tmp_path, [Host(f"n{number}", 1) for number in range(3)], 0)
    assert found.result == "ok" and found.figures["seconds_without_a_step"] == seconds, found


@pytest.mark.slow
def test_a_host_that_is_lost_is_replaced_and_the_losses_are_those_of_an_undisturbed_run(
    tiny: Tiny, capfd: pytest.CaptureFixture[str]
) -> None:
    context = CheckContext(tiny.resolve().recipe, hosts=hosts.local_hosts())
    before = {path.name for path in tiny.run_dir.iterdir()}
    found = hosts.replaced(context)
    assert found.result == "ok", found
    assert "local-2 took the place of local-1, which was lost at step 5; training went on after" in found.text
    assert "from step 4 on 2 hosts" in found.text and found.figures["loss"] < 1e-4
    assert {path.name for path in tiny.run_dir.iterdir()} == before
    said = capfd.readouterr()
    assert not said.out and not said.err, "the command prints JSON"


@pytest.mark.slow
def test_the_line_of_a_rank_that_refuses_is_shown(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of the hosts has another version of lmworks, which the ranks find out together."""
    (tmp_path / "n1").mkdir()
    (tmp_path / "n1" / "sitecustomize.py").write_text("import lmworks\nlmworks.__version__ = '0.0.1'\n")
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\n[ $1 = n1 ] && export PYTHONPATH={tmp_path}/n1:$PYTHONPATH\nexec sh -c "$2"\n')
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("n0\nn1\nn2\n")
    monkeypatch.setattr(checks, "CHECKS", tuple(check for check in checks.CHECKS if check.name == "spare"))
    given = [f"run_dir={tmp_path}/run", f"launch.ssh={ssh}", "launch.health_check=false"]
    words = ["preflight", str(tiny.recipe), "--hosts", str(tmp_path / "hosts"), "--json", *(f"--set={one}" for one in given)]
    monkeypatch.setattr(sys, "argv", ["lmworks", *words])
    with pytest.raises(SystemExit) as left:
        main()
    found = json.loads(capfd.readouterr().out)[0]
    assert left.value.code == ExitCode.FAILED and found["result"] == "fail", found
    said = r"n1 was not lost at step 5, and the run ended with code 2: lmworks is 0\.[01]\.[01] on rank .* install the same version on .*"
    assert re.fullmatch(said, found["text"]), found


@pytest.mark.slow
def test_a_spare_that_is_sick_is_found_before_money_is_spent(tiny: Tiny, tmp_path: Path) -> None:
    """Hosts over a command in place of ssh; the spare's driver has lost a GPU, so nothing can replace the host that is lost."""
    for number in range(3):
        record(tmp_path / f"n{number}", tmp_path)
    gpus = tmp_path / "n2" / "nvml.json"
    gpus.write_text(json.dumps(json.loads(gpus.read_text())[1:]))
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nexport LMWORKS_MACHINE=recorded={tmp_path}/$1\nexec sh -c "$2"\n')
    ssh.chmod(0o755)
    recipe = tiny.resolve(f"launch.ssh={ssh}").recipe
    found = hosts.replaced(CheckContext(recipe, hosts=[Host(f"n{number}", 1) for number in range(3)]))
    assert found.result == "fail" and "1 hosts are left, and at least 2 are needed" in found.text, found
    assert "n2: its health check failed: GPU memory errors: the driver finds 7 of 8 GPUs" in found.text
