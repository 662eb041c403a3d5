"""Every declared metric is written by a run, or says what a run must have for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmworks.host.counters import read_counters
from lmworks.metrics.log import read
from lmworks.metrics.names import DISKS, GROUP, HEAD, KILLS, METRICS, NETWORK, OWN, PRESSURE, SOURCES, describe
from lmworks.train.dpo import dpo
from lmworks.train.grpo import grpo
from saved_run import save_run
from tiny_run import Tiny, training_context

# All that a run on one CPU can have: evaluations, a penalty, experts, a warm-up of theirs, tokens ahead, fp16, signals per layer, needles.
ALL = (
    "train.phases.long.ewc.weight=1", "train.phases.long.ewc.sequences=1", "model.moe.temperature_steps=4",
        "model.mtp.num_nextn_predict_layers=1",
    "model.use_qk_norm=false", "optimizer.qk_clip_threshold=100",
    "model.moe.balance.sequence_aux_loss_weight=0.0001", "train.precision=fp16", "metrics.detail_every=8 steps",
    "train.phases.long.needle=true", "train.phases.long.sequence_length=256 tokens", "train.phases.long.global_batch_tokens=512 tokens",
)  # fmt: skip
COUNTED = {PRESSURE: "cpu_pressure", GROUP: "throttled", KILLS: "oom_kills", NETWORK: "network", DISKS: "disk_read"}


def elsewhere() -> set[str]:
    """The conditions that a run of one rank on this machine does not meet."""
    counted = read_counters()
    missing = {when for when, counter in COUNTED.items() if getattr(counted, counter) is None}
    return missing | {"several ranks", "an NVIDIA GPU and lmworks[gpu]", "an NVIDIA GPU"}


def written(run: Tiny, *overrides: str) -> set[str]:
    run.pretrain(*overrides)
    return {describe(name).name for line in read(run.run_dir) for name in line if name not in ("step", "time")}


def written_by_alignment(tiny: Tiny, folder: Path) -> set[str]:
    """The metrics of preference optimization and reinforcement learning."""
    rows = [{"prompt": f"Say {n}", "answer": "a", "chosen": "yes", "rejected": "no"} for n in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    data: dict[str, Any] = {"name": "rows", "kind": "files", "path": str(folder / "rows.jsonl")}
    common = {"sequence_length": "64 tokens"}
    options = {
        "dpo": common | {"data": [data], "loss": "kto", "pairs_per_step": 8, "validation_fraction": 0.2},
        "grpo": common | {"data": [data | {"reward": "exact"}], "group_size": 2, "prompts_per_step": 2, "steps": 1, "beta": 0.1,
        "max_new_tokens": 4, "validation_prompts": 2},
    }  # fmt: skip
    save_run(tiny, folder / "aligned")
    recipe = tiny.resolve(f"run_dir={folder / 'aligned'}", *(f"{stage}={json.dumps(node)}" for stage, node in options.items())).recipe
    found: set[str] = set()
    for name, train in (("dpo", dpo), ("grpo", grpo)):
        train(training_context(recipe, folder / "aligned"))
        found |= {describe(key).name for line in read(folder / "aligned" / name) for key in line if key not in ("step", "time")}
    return found


def test_every_metric_is_written_by_the_runs_that_it_names(tiny_copy: Tiny, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"question": "Which?", "choices": ["this", "that"], "answer": 0}\n')
    (tmp_path / "own.yaml").write_text("file: own.jsonl\nchoices: choices\n")
    plain = tiny_copy.copy(tiny_copy.run_dir.parent / "plain")
    always = {name for name, metric in METRICS.items() if not metric.when}
    of_experts = {name for name, metric in METRICS.items() if metric.when == "model.moe"}
    machine = {name for name, metric in METRICS.items() if metric.when in COUNTED.keys() - elsewhere()}
    usual = {name for name, metric in METRICS.items() if metric.when in (SOURCES, OWN, HEAD)}
    assert written(plain, "model.moe=null", "train.phases.long.tokens=1024 tokens") == always | machine | usual
    found = written(tiny_copy, *ALL, f"evaluate.benchmarks=[{tmp_path}/own.yaml]", "evaluate.every=8 steps")
    assert of_experts <= found
    found |= written_by_alignment(tiny_copy, tmp_path)
    assert METRICS.keys() - found == {name for name, metric in METRICS.items() if metric.when in elsewhere()}
