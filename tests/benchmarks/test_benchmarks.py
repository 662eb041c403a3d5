"""Each benchmark runs at a toy size. What it measures there means nothing; an interface that has changed would end it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tiny_run import Tiny

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RUN, OUT = "RUN", "OUT"  # a run with shards, and an empty folder
TOYS = {
    "ablations": [OUT, "--count", "1", "--jobs", "1"],
    "checkpoint": ["--ranks", "1", "2", "--saves", "2", "--rows", "64"],
    "checkpoint_scale": [],
    "data": ["--megabytes", "0.5", "--rounds", "1", "--vocab-size", "512", "--batch", "8192", "--sources", "3"],
    "data_at_scale": [],
    "decontamination": ["--documents", "400", "--items", "3", "--shown", "1"],
    "evaluation": [
        "--hidden-size", "64", "--layers", "2", "--sets", "openbookqa,winogrande", "--items", "8", "--batch-sizes", "8", "--rounds", "1",
    ],
    "minhash": ["--documents", "200", "--millions", "0.01"],
    "muon_adamw": [RUN, "--results", f"{OUT}/muon.jsonl", "--seeds", "1", "--processes", "1"],
    "muon_sharded": ["--rounds", "1"],
    "serving": ["--engines", f"{OUT}/none", "--shape", "dense", "--concurrent", "2", "--rounds", "2"],
    "size_table": [],
    "step_costs": [],
    "tokenizer": ["--megabytes", "1", "--vocab-size", "1000", "--rounds", "1"],
    "weak_scaling": ["--rows", "1", "--accumulation", "1", "--rounds", "1", "--dense"],
}  # fmt: skip
# What takes many minutes at any size, needs other programs, packages or models, and the programs that others start.
OTHERS = {
    "alignment", "corpus", "corpus_datatrove", "filters", "ladder", "layer_types", "learning", "nanochat_parts", "pretrained_rates",
    "recovery", "train_cpu", "train_cpu_peer",
}  # fmt: skip


def test_all_benchmarks_are_here() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == TOYS.keys() | OTHERS


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_a_benchmark_runs(name: str, tiny: Tiny, tmp_path: Path) -> None:
    words = [word.replace(OUT, str(tmp_path)).replace(RUN, str(tiny.run_dir)) for word in TOYS[name]]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", *words], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OTHERS - {"corpus_datatrove", "nanochat_parts", "train_cpu_peer"}))
def test_the_others_say_what_they_take(name: str) -> None:
    done = subprocess.run([sys.executable, BENCHMARKS / f"{name}.py", "--help"], capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
