"""What makes the first step come soon on CPUs: layers that are not compiled, and memory that is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmworks.host.machine import keep_freed_memory
from lmworks.model import Transformer
from lmworks.parallel.parallelize import is_compiled
from lmworks.watch.ledger import read_ledger
from tiny_run import BRIEF, Tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize(
    ("value", "cpu", "gpu"), [("auto", False, True), ("true", True, True), ("false", False, False)],
)  # fmt: skip
def test_auto_compiles_on_gpus(tiny: Tiny, value: str, cpu: bool, gpu: bool) -> None:
    recipe = tiny.resolve(f"train.compile={value}").recipe
    assert (is_compiled(recipe, torch.device("cpu")), is_compiled(recipe, torch.device("cuda"))) == (cpu, gpu)


@pytest.mark.parametrize(("value", "expected"), [("auto", "eager"), ("true", "compiled")])
def test_a_run_trains_as_the_recipe_says(
    tiny_copy: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, expected: str
) -> None:
    """From the recipe to the layers, tuning too; what was done is in the ledger."""
    compiled: list[Transformer] = []
    monkeypatch.setattr(Transformer, "compile", lambda model, **_: compiled.append(model))
    left = tmp_path / "cache" / "ab" / "left.main.so"  # by a compiler that was killed in an earlier run
    left.parent.mkdir(parents=True)
    left.touch()
    os.utime(left, (1, 1))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    tiny_copy.walk(*BRIEF, f"train.compile={value}", last="tune")
    assert left.exists() == (expected == "eager")
    assert len(compiled) == (2 if expected == "compiled" else 0)
    starts = [line["layers"] for line in read_ledger(tiny_copy.run_dir / "ledger.jsonl") if line["event"] == "start"]
    assert starts == [expected, expected]


_FAULTS = """
import resource, sys
from pathlib import Path

size = 1 << 26

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * size
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
unkept = faults()
from tiny_run import Tiny
Tiny(Path(sys.argv[1]), Path(sys.argv[2])).pretrain("train.phases.general.tokens=2560 tokens", "train.phases.long.tokens=1024 tokens")
faults()
print(unkept, faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(__import__("ctypes").CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_training_keeps_the_memory_that_it_frees(tiny_copy: Tiny) -> None:
    """64 MB that were freed are cleared anew, 16,384 pages of them, before training has begun, and not after."""
    paths = [str(path) for path in sys.path if Path(path).name in ("src", "tests")]
    environment = {"PYTHONPATH": ":".join(paths), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", _FAULTS, str(tiny_copy.recipe), str(tiny_copy.run_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    unkept, kept = map(int, done.stdout.splitlines()[-1].split())
    assert kept < 1_000 < 10_000 < unkept


def test_where_the_c_library_cannot_keep_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not keep_freed_memory()
