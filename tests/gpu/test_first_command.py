"""The first command on a GPU, on a CPU: it writes each row at once and stops at nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
FIRST = ROOT / "benchmarks" / "gpu" / "first.py"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_it_stops_at_nothing(tmp_path: Path) -> None:
    """A check that raises, one that dies, one that hangs with a process that it has started, and a sound one after them."""
    code = f"""
    import os, signal, subprocess, sys, time
    from pathlib import Path
    sys.path.insert(0, {str(ROOT / "benchmarks")!r})
    from gpu.runner import Check, Report, run

    def raises(toy):
        yield {{"seen": float("nan"), "toy": toy}}
        raise ValueError("no kernel image")

    def dies(toy):
        yield {{"seen": 1}}
        os.kill(os.getpid(), signal.SIGSEGV)

    def hangs(toy):
        child = subprocess.Popen(["sleep", "1000"])
        yield {{"child": child.pid}}
        time.sleep(1000)

    def works(toy):
        yield {{"seen": 2}}

    checks = [Check("raises", raises, 60), Check("dies", dies, 60), Check("hangs", hangs, 0.5), Check("works", works, 60)]
    print(run(checks, Report(Path({str(tmp_path / "out.jsonl")!r})), True, 60), file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, encoding="utf-8", check=True)
    assert done.stderr.strip() == "['raises', 'dies', 'hangs']"
    found = rows(tmp_path / "out.jsonl")
    assert [json.loads(line) for line in done.stdout.splitlines()] == found
    assert [(row["check"], row.get("ok")) for row in found] == [
        ("raises", None), ("raises", False), ("dies", None), ("dies", False), ("hangs", None), ("hangs", False),
        ("works", None), ("works", True),
    ]  # fmt: skip
    assert found[1]["error"] == "ValueError: no kernel image" and "ended with -11" in found[3]["error"] and "no end" in found[5]["error"]
    with suppress(psutil.NoSuchProcess):  # it is dead, and may wait for its parent
        assert psutil.Process(found[4]["child"]).status() == psutil.STATUS_ZOMBIE


def first(tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    out = tmp_path / "first.jsonl"
    done = subprocess.run([sys.executable, FIRST, "--out", out, *arguments], capture_output=True, encoding="utf-8")
    return done.returncode, rows(out) if out.exists() else [], done.stderr


def test_quick_checks_run_at_toy_size(tmp_path: Path) -> None:
    """Those that compile or train from text take longer; `make gpu TOY=--toy` runs all of them."""
    names = ["versions", "grouped products", "decode"]
    code, found, said = first(tmp_path, "--toy", "--only", *names)
    assert code == 0, (found, said)
    assert [row["check"] for row in found if row.get("ok")] == names
    assert set(next(row for row in found if "imports" in row)["imports"].values()) == {"imported"}
    assert {row["case"] for row in found if row["check"] == "grouped products" and row.get("sound")} == {
        "ragged", "empty experts", "one token", "no token"
    }  # fmt: skip
    assert next(row for row in found if "tokens_per_second" in row)["rows"] == 4


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    code, _, said = first(tmp_path, "--only", "versions")
    assert code == 2 and "--toy" in said
    code, _, said = first(tmp_path, "--toy", "--only", "speed of light")
    assert code == 2 and "there is no check speed of light" in said


def test_what_the_machine_lacks_is_read_from_wheels(tmp_path: Path) -> None:
    """Packages that it has stay as they are, and nothing is left behind."""
    for name, text in (("only_here", "VALUE = 3"), ("numpy", "raise ImportError('from a wheel')")):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", text)
    code = f"import sys; from pathlib import Path; sys.path.insert(0, {str(FIRST.parent)!r}); import first"
    code += "; first.add_paths(Path(sys.argv[1])); import numpy, only_here; print(only_here.VALUE, only_here.__file__)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, encoding="utf-8", check=True)
    value, _, where = done.stdout.strip().partition(" ")
    assert value == "3" and not Path(where).parent.exists()
