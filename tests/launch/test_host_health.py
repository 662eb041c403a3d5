"""What is said of hosts: by their own reports, by the lack of one, by their clocks, and by a comparison with each other."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmworks.health.report import Checked, Report, Result
from lmworks.launch import host_health
from lmworks.launch.host_health import HostChecker, compare, with_clock
from lmworks.launch.torchrun import Host

HOSTS = [Host("n1", 1), Host("n2", 1)]
VERSIONS = {"torch": "2.13.0", "lmworks": "0.1.0", "kernel": "6.8"}


def report(host: str = "n1", rate: float = 1e9, ports: float = 8.0, **versions: str) -> Report:
    checks = [
        Checked("write", "write test", Result("ok", "", figures={"write_bytes_per_second": rate})),
        Checked("infiniband", "ports", Result("ok", "", figures={"active_ports": ports})),
    ]
    return Report(host, 100.0, 101.0, checks, VERSIONS | versions)


def says(tmp_path: Path, program: str, seconds: float = 20.0) -> Report:
    """The report of a host on which `lmworks health` does this."""
    path = tmp_path / "host.py"
    path.write_text(program)
    return HostChecker(lambda script, host: [sys.executable, str(path)], tmp_path).check(HOSTS[:1])["n1"]


def now(ahead: float = 0.0, **more: Any) -> str:
    tree = report().to_json() | more
    return (
        f"import json, time\ntree = {tree!r}\ntree |= {{'began': time.time() + {ahead}, 'ended': time.time() + {ahead}}}\n"
        "print(json.dumps(tree))"
    )


def test_a_report_is_taken_with_the_name_of_the_launcher(tmp_path: Path) -> None:
    found = says(tmp_path, now(host="its-own-name"))
    assert found.host == "n1" and found.failures == [] and found.code == 0


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('{}')", "answer: the check exited with code 0"),
        ("print('[' * 100000)", "the check exited with code 0"),
        ("import sys; sys.exit('ssh: connect to host n1: No route to host')", "exited with code 1: ssh: connect to host n1: No route"),
        ("import os; os.write(1, b'\\xff' * 100); os.kill(os.getpid(), 9)", "exited with code -9"),
    ],
)
def test_a_host_without_a_report_fails(tmp_path: Path, program: str, said: str) -> None:
    (failure,) = says(tmp_path, program).failures
    assert said in failure


def test_a_host_that_does_not_answer_and_a_command_that_is_not_there_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_health, "_CONNECT", 0.5)
    monkeypatch.setattr(host_health, "QUICK_SECONDS", 0.0)
    began = time.monotonic()
    assert says(tmp_path, "import time; time.sleep(1000)").failures == ["answer: no answer within 0 s"]
    assert time.monotonic() - began < 20
    found = HostChecker(lambda script, host: ["/nowhere/ssh", script], tmp_path).check(HOSTS)
    assert found["n2"].failures == ["answer: /nowhere/ssh: No such file or directory"]


@pytest.mark.parametrize(("ahead", "said"), [(3600.0, "at least 3,600.0 s ahead of"), (-90.0, "at least 90.0 s behind")])
def test_a_wrong_clock_is_found_through_the_command(tmp_path: Path, ahead: float, said: str) -> None:
    (failure,) = says(tmp_path, now(ahead)).failures
    assert failure.startswith("clock beside the launcher's: the clock is at least") and said.split()[-1] in failure
    number = float(failure.split("at least ")[1].split(" s ")[0].replace(",", ""))
    assert abs(ahead) - 5 < number <= abs(ahead)


def test_a_launcher_whose_clock_is_set_meanwhile_blames_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([time.time(), *[time.time() - 1000.0] * 9])
    monkeypatch.setattr(host_health, "time", SimpleNamespace(time=lambda: next(clock), monotonic=time.monotonic))
    assert says(tmp_path, now(0.0)).failures == []


@pytest.mark.parametrize(
    ("began", "ended", "status"),
    [(10.5, 11.5, "ok"), (10.0, 12.0, "ok"), (9.5, 10.5, "ok"), (8.5, 9.5, "fail"), (12.0, 13.5, "fail"), (11.5, 12.9, "ok")],
)
def test_a_clock_is_wrong_only_beyond_what_the_way_to_the_host_explains(began: float, ended: float, status: str) -> None:
    """Asked for at 10, received at 12."""
    found = with_clock(replace(report(), began=began, ended=ended), 10.0, 12.0)
    assert found.checks[-1].result.status == status


def others(*reports: Report) -> dict[str, Result]:
    found = compare({one.host: one for one in reports})
    return {name: one.checks[-1].result for name, one in found.items()}


def test_a_host_that_differs_from_the_others_is_named() -> None:
    same = report("n1"), report("n2"), report("n3")
    assert {result.status for result in others(*same).values()} == {"ok"}
    found = others(*same, report("n4", torch="2.12.0", kernel="5.15"))
    assert [name for name, one in found.items() if one.status == "fail"] == ["n4"]
    assert found["n4"].text == "torch 2.12.0, 3 of 4 hosts have 2.13.0"
    found = others(*same, report("n4", ports=7.0))
    assert found["n4"].text == "7 active InfiniBand ports, others have 8" and found["n1"].status == "ok"
    found = others(*same, report("n4", rate=2e8))
    assert found["n4"].status == "warn" and found["n4"].text == "writes 200 MB/s, the median of the hosts is 1,000 MB/s"


def test_of_two_hosts_with_two_versions_both_are_named() -> None:
    found = others(report("n1"), report("n2", torch="2.12.0"))
    assert [one.status for one in found.values()] == ["fail", "fail"]
    assert "others have 2.12.0" in found["n1"].text + found["n2"].text


def test_one_host_and_hosts_without_a_report_are_compared_with_nobody() -> None:
    lost = host_health.unreachable("n2", 1.0, 2.0, "no route")
    assert compare({"n1": report(), "n2": lost}) == {"n1": report(), "n2": lost}


def test_what_is_asked_of_a_host_is_what_was_asked_for(tmp_path: Path) -> None:
    made = HostChecker(lambda script, host: [], tmp_path, ("head:29400",), False, ("clock", "ports"), (80, 81), 7.0)
    said = made.script().split(" health ")[1].split()
    assert "--quick" not in said and said[said.index("--timeout") + 1] == "7" and said[said.index("--reach") + 1] == "head:29400"
    assert [said[place + 1] for place, word in enumerate(said) if word in ("--only", "--port")] == ["clock", "ports", "80", "81"]
    assert HostChecker(made.command, tmp_path).seconds < HostChecker(made.command, tmp_path, quick=False).seconds


def test_the_script_is_one_that_a_shell_runs(tmp_path: Path) -> None:
    """The real command on this machine, with the address of a launcher that is not there."""
    checker = HostChecker(lambda script, host: ["sh", "-c", script], tmp_path, ("127.0.0.1:1",))
    found = checker.check(HOSTS[:1])["n1"]
    assert [failure.partition(":")[0] for failure in found.failures] == ["connection to the launcher"], found.failures
    assert json.loads(json.dumps(found.to_json()))["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
