"""`lmworks health` as Slurm or a user starts it, on recordings and on this machine, with mounts of its own where the kernel allows them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmworks.health.checks import Check
from lmworks.health.report import Checked, HostsReport, Report, Result, Status
from node_recording import record
from written_run import command_line


def health(*words: str, recorded: Path | None = None, prefix: tuple[str, ...] = (), ssh: Path | None = None) -> tuple[int, str]:
    environment = os.environ | ({"LMWORKS_MACHINE": f"recorded={recorded}"} if recorded else {})
    environment |= {"PATH": f"{ssh.parent}{os.pathsep}{os.environ['PATH']}"} if ssh else {}
    command = [*prefix, sys.executable, "-P", "-m", "lmworks.cli.main", "health", *words]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
    return done.returncode, done.stdout + done.stderr


def checks(said: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads(said)["checks"]}


def test_the_exit_code_is_that_of_the_node(tmp_path: Path) -> None:
    root = record(tmp_path / "recording", tmp_path)
    code, said = health(str(tmp_path), recorded=root)
    # the disk that is written to is this machine's own, and may be busy
    assert code == 0 and re.search(r"healthy \((18 ok, 0|17 ok, 1) with a warning, 0 could not judge, 1 not checked\)", said), said
    assert "1 warnings" not in said or re.search(r"^warn .* write test: ", said, re.MULTILINE), said
    (root / "sys/devices/system/edac/mc/mc0/ue_count").write_text("1")
    code, said = health(str(tmp_path), "--quick", "--json", recorded=root)
    tree = json.loads(said)
    assert code == tree["code"] == 1 and tree["verdict"] == "failed" and tree["versions"]["nvidia driver"] == "570.86.15"
    assert "stress" not in checks(said) and checks(said)["memory_errors"]["status"] == "fail"
    assert checks(said)["write"]["text"].startswith("4 blocks of 4 MiB")
    (root / "nvml.json").unlink()
    shutil.rmtree(root / "proc/driver")
    code, said = health("--only", "gpu_errors", recorded=root)
    assert code == 1 and "8 NVIDIA GPUs are on the PCI bus, and no driver is loaded" in said
    (root / "programs" / "stress").write_text("")
    code, said = health("--only", "stress", "--quick", "--json", recorded=root)
    assert code == 2 and checks(said)["stress"]["status"] == "unknown", "what is asked for by name is done"


def test_ports_and_addresses_that_are_given_are_tried(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def asked(*words: object) -> tuple[int, str]:
        code, out, _ = command_line(monkeypatch, capsys, "health", "--json", *words)
        return code, json.loads(out)["checks"][0]["text"]

    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        code, said = asked("--only", "ports", "--port", port)
        assert code == 1 and f"cannot listen on {port}: " in said
        assert asked("--only", "reach", "--reach", f"127.0.0.1:{port}") == (0, f"127.0.0.1:{port} can be reached")
    code, said = asked("--only", "reach", "--reach", f"127.0.0.1:{port}")
    assert code == 1 and f"cannot connect to 127.0.0.1:{port}" in said


def test_the_limit_that_is_given_ends_a_check_that_hangs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hangs = Check("driver", "driver", lambda node, request: time.sleep(1000), "the driver hangs")  # type: ignore[func-returns-value]
    monkeypatch.setattr("lmworks.health.checks.CHECKS", (hangs,))
    code, out, _ = command_line(monkeypatch, capsys, "health", "--quick", "--timeout", "1")
    assert code == 1 and "the driver hangs: no answer within 1 s" in out


@pytest.mark.slow
def test_this_machine_is_checked_within_the_limit_of_slurm(tmp_path: Path) -> None:
    code, said = health(str(tmp_path / "no run yet"), "--json", "--only", "stress", "--only", "write", "--only", "leftovers")
    found = checks(said)
    assert code == 0 and [one["status"] for one in found.values()] == ["ok", "ok", "ok"], said
    assert found["stress"]["figures"]["core/lowest_flops"] > 1e8 and json.loads(said)["ended"] - json.loads(said)["began"] < 55


SSH = """\
#!/bin/sh
# `ssh -o BatchMode=yes HOST SCRIPT` with recordings for hosts.
[ -e {folder}/$3 ] || {{ echo "ssh: connect to host $3: No route to host" >&2; exit 255; }}
LMWORKS_MACHINE=recorded={folder}/$3 exec sh -c "$4"
"""


def hosts_of(tmp_path: Path, *names: str) -> Path:
    """The ssh command of a network with these hosts."""
    for name in names:
        record(tmp_path / name, tmp_path)
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH.format(folder=tmp_path))
    ssh.chmod(0o755)
    return ssh


def test_several_hosts_are_one_table_and_the_worst_decides(tmp_path: Path) -> None:
    ssh = hosts_of(tmp_path, "n1", "n2")
    words = (str(tmp_path), "--hosts", "n1,n2,n3", "--only", "memory_errors", "--only", "clock", "--only", "stress")
    (tmp_path / "n2/sys/devices/system/edac/mc/mc0/ue_count").write_text("1")
    (tmp_path / "n2/programs/stress").write_text("")
    code, said = health(*words, ssh=ssh)
    assert code == 1 and "Traceback" not in said
    rows = [line.split() for line in said.splitlines() if line.startswith(("ok", "fail", "unknown"))]
    assert [(row[0], row[1]) for row in rows if "memory errors" in " ".join(row)] == [("ok", "n1"), ("fail", "n2")]
    (lost,) = (" ".join(row) for row in rows if row[1] == "n3")
    assert lost.endswith("answer: the check exited with code 255: ssh: connect to host n3: No route to host")
    assert "1 of 3 hosts are healthy; failed: n2, n3" in said.splitlines()
    (tmp_path / "n2/sys/devices/system/edac/mc/mc0/ue_count").write_text("0")
    (tmp_path / "hosts").write_text("n1 slots=8\nn2 slots=8\n")
    code, said = health(str(tmp_path), "--hosts", str(tmp_path / "hosts"), *words[3:], "--json", ssh=ssh)
    tree = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert code == tree["code"] == 2 and tree["verdict"] == "unknown" and tree["checks"] == []
    assert {host["host"]: host["verdict"] for host in tree["hosts"]} == {"n1": "healthy", "n2": "unknown"}
    skew = [check["figures"]["skew_seconds"] for host in tree["hosts"] for check in host["checks"] if check["name"] == "skew"]
    assert len(skew) == 2


def test_the_worst_is_a_failure_before_a_doubt() -> None:
    def report(status: Status) -> Report:
        return Report("n", 0.0, 1.0, [Checked("clock", "clock", Result(status, ""))])

    def code(*hosts: Status, between: tuple[Status, ...] = ()) -> int:
        checks = [Checked("links", "links", Result(status, "")) for status in between]
        return HostsReport({str(place): report(status) for place, status in enumerate(hosts)}, checks).code

    assert [code("ok", "ok"), code("ok", "unknown"), code("unknown", "fail"), code("fail", "unknown")] == [0, 2, 1, 1]
    assert [code("ok", between=(one,)) for one in ("ok", "fail", "unknown", "skip")] == [0, 1, 2, 0]


@pytest.mark.slow
def test_the_links_of_hosts_are_measured(tmp_path: Path) -> None:
    ssh = hosts_of(tmp_path, "n1", "n2")
    words = (str(tmp_path), "--hosts", "n1,n2,n3", "--only", "clock", "--links", "--address", "127.0.0.1", "--json")
    code, said = health(*words, ssh=ssh)
    tree = json.loads(said[said.index("{") : said.rindex("}") + 1])
    found = {check["name"]: check for check in tree["checks"]}
    assert code == 1 and {host["host"]: host["code"] for host in tree["hosts"]} == {"n1": 0, "n2": 0, "n3": 1}
    assert found["links_between"]["figures"]["n1-n2/bytes_per_second"] > 0 and found["links_between"]["status"] == "ok"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--hosts", "n1,n1"), "--hosts:2: n1 is listed twice"),
        (("--only", "gpus"), "--only 'gpus' is no check; these are: gpu_errors,"),
        (("--reach", "head"), "--reach 'head' is not an address; write HOST:PORT"),
    ],
)
def test_options_that_are_wrong(words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told without torch, which takes seconds to import."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    code, text = health(*words)
    assert code == 2 and said in text
    imported = {line.rpartition("|")[2].strip() for line in text.splitlines() if line.startswith("import time:")}
    assert "lmworks.cli.health_command" in imported and "torch" not in imported


def test_a_recording_that_is_not_there(tmp_path: Path) -> None:
    code, text = health(recorded=tmp_path / "nowhere")
    assert code == 2 and "nowhere is not a folder" in text


@pytest.mark.parametrize(("mount", "name", "said"), [
    ("mount -t tmpfs -o size=2m none {0}", "write", "No space left"),
    ("mount -t tmpfs -o ro none {0}", "mounts", "is mounted read-only"),
    ("mount -t tmpfs -o ro none {0}", "write", "Read-only file system"),
    ("mount -t tmpfs -o nr_inodes=20 none {0}", "space", "inodes"),
])  # fmt: skip
def test_disks_that_are_full_or_read_only(tmp_path: Path, mount: str, name: str, said: str) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount: unshare -m")
    place = tmp_path / "disk"
    place.mkdir()
    code, text = health(
        str(place), "--only", name, "--json", prefix=("unshare", "-m", "sh", "-c", f'{mount.format(place)} && exec "$@"', "sh")
    )
    assert code == 1 and said in checks(text)[name]["text"], text


def test_the_script_for_slurm_drains_a_node_that_fails(tmp_path: Path) -> None:
    """The script of docs/running.md, with a Slurm that writes down what it is told."""
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text(encoding="utf-8")
    script = page.partition("```text\n#!/bin/sh\n")[2].partition("```")[0].replace("/scratch", str(tmp_path))
    programs, told = tmp_path / "bin", tmp_path / "told"
    programs.mkdir()
    stand_ins = {"lmworks": f'exec {sys.executable} -P -m lmworks.cli.main "$@" --quick', "scontrol": f'printf "%s\\n" "$@" >>{told}'}
    for name, text in stand_ins.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    root = record(tmp_path / "recording", tmp_path)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "LMWORKS_MACHINE": f"recorded={root}"}
    subprocess.run(["sh", "-c", script], env=environment, check=True)
    assert not told.exists(), "a healthy node is left alone"
    (root / "clock_offset").write_text("-1e9")
    subprocess.run(["sh", "-c", script], env=environment, check=False)
    lines = told.read_text().splitlines()
    assert lines[0] == "update" and lines[2] == "State=DRAIN" and lines[3].startswith("Reason=lmworks health: clock: the clock says"), lines
