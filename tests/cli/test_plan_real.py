"""The plan of the real model beside its run: steps and tokens exactly, and memory within a fifth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmworks.metrics.log import read
from smollm2 import gguf_file

LORA = {"rank": 16, "targets": ["all-linear"]}


def _lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("stage", "lora"), [("tune", False), ("tune", True), ("dpo", True), ("grpo", True)])
def test_the_plan_of_the_real_model_is_what_the_run_needs(tmp_path: Path, stage: str, lora: bool) -> None:
    asked = [f"What is {a} plus {b}? Say it in a whole sentence." for a in range(5) for b in range(5)]
    rows: dict[str, list[Any]] = {
        "tune": [{"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": "It is right. " * 20}]} for one in asked],
        "dpo": [{"prompt": one, "chosen": "It is right. " * 20, "rejected": "No, it is not. " * 20} for one in asked[:9]],
        "grpo": [{"prompt": one, "answer": "1"} for one in asked],
    }
    own = {"name": "own", "kind": "files", "path": _lines(tmp_path / "rows.jsonl", rows[stage])}
    section: dict[str, Any] = {
        "tune": {"data": [own], "tokens": "2Ki", "global_batch_tokens": "1Ki"},
        "dpo": {"data": [own], "pairs_per_step": 4},
        "grpo": {
            "data": [own | {"reward": "numeric"}], "steps": 1, "group_size": 4, "prompts_per_step": 4, "max_new_tokens": 32,
            "validation_prompts": 2,
        },
    }[stage]  # fmt: skip
    steady = {"kind": "constant", "warmup": "0%"}
    tree = {
        "name": "real", "start_from": str(gguf_file()), "run_dir": str(tmp_path / "run"), "threads": 1,
        stage: section | {"sequence_length": "256 tokens", "lr_schedule": steady} | ({"lora": LORA} if lora else {}),
        "train": {"validate_every": "100%", "save_every": "100%"},
        "evaluate": {"benchmarks": [], "questions": ["Hi"]}, "export": {"huggingface": False, "gguf": False},
    }  # fmt: skip
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree), encoding="utf-8")
    command = [sys.executable, "-m", "lmworks.cli.main"]  # a process of its own, whose memory is that of the run
    plan = json.loads(subprocess.run([*command, "plan", str(recipe), "--json"], check=True, capture_output=True).stdout)
    subprocess.run([*command, stage, str(recipe)], check=True)
    (phase,), found, last = plan["phases"], plan["data"][stage], list(read(tmp_path / "run" / stage))[-1]
    assert found["steps"] == phase["steps"] == last["step"]
    if stage != "grpo":  # how long answers are is known when they are written
        assert found["read"] == phase["tokens"] == last["train/tokens"]
    measured = last["perf/memory"]
    assert abs(phase["placed"]["memory_total"] / measured - 1) < 0.2, f"{phase['placed']['memory']}, measured {measured / 2**30:.2f} GiB"
