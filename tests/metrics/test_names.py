"""Every declared metric is written by a run, or says what a run must have for it."""

from __future__ import annotations

from pathlib import Path

from lmworks.metrics.log import read
from lmworks.metrics.names import METRICS, describe
from tiny_run import Tiny

# All that a run on one CPU can have: evaluations, a penalty, experts, a warm-up of theirs, tokens ahead, fp16, signals per layer, needles.
ALL = (
    "train.phases.long.ewc.weight=1", "train.phases.long.ewc.sequences=1", "model.moe.temperature_steps=4",
        "model.mtp.num_nextn_predict_layers=1",
    "model.moe.balance.sequence_aux_loss_weight=0.0001", "train.precision=fp16", "metrics.detail_every=8 steps",
    "train.phases.long.needle=true", "train.phases.long.sequence_length=256 tokens", "train.phases.long.global_batch_size=512 tokens",
)  # fmt: skip
ELSEWHERE = {"several ranks", "an NVIDIA GPU and lmworks[gpu]"}


def written(run: Tiny, *overrides: str) -> set[str]:
    run.pretrain(*overrides)
    return {describe(name).name for line in read(run.run_dir) for name in line if name not in ("step", "time")}


def test_every_metric_is_written_by_the_runs_that_it_names(tiny_copy: Tiny, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"question": "Which?", "choices": ["this", "that"], "answer": 0}\n')
    (tmp_path / "own.yaml").write_text("file: own.jsonl\nchoices: choices\n")
    plain = tiny_copy.copy(tiny_copy.run_dir.parent / "plain")
    always = {name for name, metric in METRICS.items() if not metric.when}
    of_experts = {name for name, metric in METRICS.items() if metric.when == "model.moe"}
    assert always <= written(plain, "model.moe=null", "train.phases.long.tokens=1024 tokens") <= always
    found = written(tiny_copy, *ALL, f"evaluate.benchmarks=[{tmp_path}/own.yaml]", "evaluate.every=8 steps")
    assert of_experts <= found
    assert METRICS.keys() - found == {name for name, metric in METRICS.items() if metric.when in ELSEWHERE}
