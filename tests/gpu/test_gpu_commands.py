"""The commands on a GPU, on a CPU: they write each row at once and stop at nothing."""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fake_cuda import FakeCuda
from lmworks.recipe.load import load_cluster

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
QUICK = {  # those that compile, measure the peak, train from text or have 8,192 ranks take longer; `make gpu TOY=--toy` runs all of them
    "first": ["versions", "grouped products", "decode"],
    "second": ["muon", "fp8"],
    "third": ["sparse layer"],
}


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


def command(name: str, tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """`make gpu COMMAND=name` here: exit code, rows, and what is said."""
    out = tmp_path / f"{name}.jsonl"
    make = ["make", "gpu", f"PYTHON={sys.executable}", f"COMMAND={name}", f"GPU_OUT={out}", f"CHECKS={' '.join(arguments)}"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, encoding="utf-8")
    return done.returncode, rows(out) if out.exists() else [], done.stderr


def only(names: list[str]) -> str:
    return "--only " + " ".join(f"'{name}'" for name in names)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The rows of the quick checks of each command at toy size."""
    everything = {}
    for name, checks in QUICK.items():
        code, lines, said = command(name, tmp_path_factory.mktemp(name), "--toy", only(checks))
        assert code == 0, (lines, said)
        assert [row["check"] for row in lines if row.get("ok")] == checks
        everything[name] = lines
    return everything


def of(lines: list[dict[str, Any]], check: str, key: str) -> list[dict[str, Any]]:
    return [row for row in lines if row["check"] == check and key in row]


@pytest.mark.slow  # .ci/run has all checks at this size
def test_first_quick_checks_run_at_toy_size(found: dict[str, list[dict[str, Any]]]) -> None:
    lines = found["first"]
    assert set(of(lines, "versions", "imports")[0]["imports"].values()) == {"imported"}
    assert {row["case"] for row in of(lines, "grouped products", "sound")} == {"ragged", "empty experts", "one token", "no token"}
    assert of(lines, "decode", "tokens_per_second")[0]["rows"] == 4


@pytest.mark.slow  # .ci/run has all checks at this size
def test_second_command_at_toy_size(found: dict[str, list[dict[str, Any]]]) -> None:
    lines = found["second"]
    assert all(row["tflops"] > 0 for row in of(lines, "muon", "shape")) and len(of(lines, "muon", "shape")) == 2
    bf16, fp8 = of(lines, "fp8", "block")
    assert max(bf16["errors"].values()) < 0.01
    assert "refused" in fp8 or bf16["errors"]["out"] < fp8["errors"]["out"] < 0.1  # torch 2.11 has no scales per row on CPUs


@pytest.mark.slow
def test_parts_of_a_step_at_toy_size(tmp_path: Path) -> None:
    code, lines, said = command("second", tmp_path, "--toy", only(["head loss", "documents", "shadow weights"]))
    assert code == 0, (lines, said)
    assert [(row["vocabulary"], row["chunk"]) for row in of(lines, "head loss", "ms")] == [
        (vocabulary, chunk) for vocabulary in (512, 1024) for chunk in (16, 32, 64, 128)
    ]  # fmt: skip
    assert [row["documents"] for row in of(lines, "documents", "beside_no_mask")] == [None, 1, 4, 16, 64]
    assert of(lines, "shadow weights", "saved_ms_per_micro_batch")


@pytest.mark.slow  # .ci/run has all checks at this size
def test_third_command_at_toy_size(found: dict[str, list[dict[str, Any]]]) -> None:
    parts = {row["part"]: row for row in of(found["third"], "sparse layer", "part")}
    assert list(parts) == ["cast of weights", "router", "sorting", "grouped products", "combining", "whole layer", "shared expert"]
    assert all(row["both_ms"] > 0 for name, row in parts.items() if name != "cast of weights")


@pytest.mark.slow
def test_a_rank_of_64_at_toy_size(tmp_path: Path) -> None:
    code, lines, said = command("third", tmp_path, "--toy", only(["15b of 64"]))
    assert code == 0, (lines, said)
    (plan,) = of(lines, "15b of 64", "layout")
    assert plan["ranks"] == 64 and plan["layers"] == plan["layers_of_model"]
    (built,), (step,) = of(lines, "15b of 64", "mesh_seconds"), of(lines, "15b of 64", "step_seconds")
    assert built["parameters_held"] > 0 and step["tokens_per_second"] > 0


@pytest.mark.slow
def test_attention_and_a_sparse_layer_at_full_size_on_fake_cuda(fake_cuda: FakeCuda) -> None:
    """One document in each row has a mask of blocks where its boundaries are given, as in training, beside none."""
    found = fake_cuda.run("traced_checks:rows", checks={"first": ["attention"], "third": ["sparse layer", "linear attention"]})
    assert [row["recurrence"] for row in found["linear attention"]] == ["gated delta rule", "Mamba-2"]
    masks = {row["shape"]: (row["mask"], row["blocks"]) for row in found["attention"] if "mask" in row}
    with_mask = dict.fromkeys(("causal, one mask", "documents", "window"), (True, True))
    assert masks == {"causal": (False, False)} | with_mask
    assert [row["model"] for row in found["sparse layer"] if row.get("part") == "whole layer"] == ["glm-15b-a3b", "glm46-355b-a32b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checks", "integer"),
    [
        ({"second": ["7b", *QUICK["second"]]}, 1),
        ({"third": ["15b of 64"]}, 4096 * 8 // 2),  # rows to each rank of ep, of 4,096 tokens with eight experts each
    ],
)
def test_checks_at_full_size_on_fake_cuda(fake_cuda: FakeCuda, checks: dict[str, list[str]], integer: int) -> None:
    """Every call of a check with the shapes and the device of a GPU, nothing computed: none mixes devices or has shapes that do not fit."""
    found = fake_cuda.run("traced_checks:rows", checks=checks, integer=integer)
    assert all(found.values()) and list(found) == [name for names in checks.values() for name in names]
    for row in found.get("7b", []):
        if "step_seconds" in row:
            assert 16 <= row["layers"] < 32 and 60 < row["planned_gib"] < 74.5, "of 80 GB, with a margin"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package `gpu` is that of the benchmarks, and not this folder."""
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("gpu", "command")}
    for name in kept:
        del sys.modules[name]
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("gpu", "command")]:
        del sys.modules[name]
    sys.modules.update(kept)


def test_as_many_layers_as_fit(benchmarks: None) -> None:
    """By the plan of each number, with its margin; none and all included."""
    training = importlib.import_module("gpu.training")
    cluster = load_cluster("1xh100").model_copy(update={"memory_gib": 100})
    found = [training.layers_that_fit(10, cluster, lambda layers: layers * each * training.GIB) for each in (96, 95, 10, 9.5, 9.4, 0)]  # noqa: B023
    assert found == [0, 1, 9, 10, 10, 10]


def test_without_a_gpu_it_says_what_to_do(
    tmp_path: Path, benchmarks: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = command("first", tmp_path, only(["versions"]))
    assert code == 2 and "--toy" in said
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    monkeypatch.setattr(sys, "argv", ["second.py", "--toy", "--only", "speed of light"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / "second.py"), run_name="__main__")
    assert ended.value.code == 2 and "there is no check speed of light" in capsys.readouterr().err


def test_what_the_machine_lacks_is_read_from_wheels(tmp_path: Path) -> None:
    """Packages that it has stay as they are, and nothing is left behind."""
    for name, text in (("only_here", "VALUE = 3"), ("numpy", "raise ImportError('from a wheel')")):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", text)
    code = f"import sys; from pathlib import Path; sys.path.insert(0, {str(FOLDER)!r}); import command"
    code += "; command.add_paths(Path(sys.argv[1])); import numpy, only_here; print(only_here.VALUE, only_here.__file__)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, encoding="utf-8", check=True)
    value, _, where = done.stdout.strip().partition(" ")
    assert value == "3" and not Path(where).parent.exists()
