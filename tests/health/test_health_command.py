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
from node_recording import record
from written_run import command_line


def health(*words: str, recorded: Path | None = None, prefix: tuple[str, ...] = ()) -> tuple[int, str]:
    environment = os.environ | ({"LMWORKS_MACHINE": f"recorded={recorded}"} if recorded else {})
    command = [*prefix, sys.executable, "-P", "-m", "lmworks.cli.main", "health", *words]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
    return done.returncode, done.stdout + done.stderr


def checks(said: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads(said)["checks"]}


def test_the_exit_code_is_that_of_the_node(tmp_path: Path) -> None:
    root = record(tmp_path / "recording", tmp_path)
    code, said = health(str(tmp_path), recorded=root)
    # the disk that is written to is this machine's own, and may be busy
    assert code == 0 and re.search(r"healthy \((18 ok, 0|17 ok, 1) warnings, 0 could not judge, 1 not checked\)", said), said
    assert "1 warnings" not in said or re.search(r"^warn .* write test: ", said, re.MULTILINE), said
    (root / "sys/devices/system/edac/mc/mc0/ue_count").write_text("1")
    code, said = health(str(tmp_path), "--quick", "--json", recorded=root)
    tree = json.loads(said)
    assert code == tree["code"] == 1 and tree["verdict"] == "failed" and tree["versions"]["nvidia driver"] == "570.86.15"
    assert "stress" not in checks(said) and checks(said)["memory_errors"]["status"] == "fail"
    assert checks(said)["write"]["text"].startswith("4 blocks of 4 MiB")
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--only", "gpus"), "--only 'gpus' is no check; these are: gpu_errors,"),
        (("--reach", "head"), "--reach 'head' is not an address; write HOST:PORT"),
    ],
)
def test_options_that_are_wrong(words: tuple[str, ...], said: str) -> None:
    code, text = health(*words)
    assert code == 2 and said in text


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
