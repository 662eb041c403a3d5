"""The profile of a real model under low-rank adapters, as recipes/assistant.yaml tunes it, with short steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from smollm2 import ASSISTANT, gguf_file

TRAINED = 4_884_480  # 30 layers of rank 16: rank x (inputs + outputs) of q, k, v and o, and of the three of the feed-forward


@pytest.mark.slow
def test_a_real_model_with_adapters_needs_what_is_planned(tmp_path: Path) -> None:
    """Only the adapters have gradients and moments. What was freed after the weights had been read is not counted twice. In a process of
    its own: what other tests have left in this one would count as the runtime's."""
    path = gguf_file()
    recipe = tmp_path / "assistant.yaml"
    recipe.write_text(ASSISTANT.read_text(encoding="utf-8"), encoding="utf-8")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"What is {n} + 1?", "answer": f"It is {n + 1}."}) + "\n" for n in range(60)))
    data = json.dumps([{"name": "sums", "kind": "files", "path": str(rows)}])
    sets = [f"run_dir={tmp_path}/run", f"start_from={path}", f"tune.data={data}", "tune.sequence_length=64 tokens",
            "tune.global_batch_tokens=128 tokens", "train.micro_batch_sequences=1"]  # fmt: skip
    words = [word for one in sets for word in ("--set", one)]
    command = [sys.executable, "-m", "lmworks.cli.main", "profile", str(recipe), "--steps", "1", "--warm-up", "1", "--json", *words]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    memory = {name: item["measured"] for name, item in found["memory"].items()}
    planned = {name: item["planned"] for name, item in found["memory"].items()}
    assert memory["gradients"] == 4 * TRAINED and memory["optimizer state"] == pytest.approx(8 * TRAINED, rel=0.01)
    for name in ("weights", "gradients", "optimizer state", "activations", "logits"):
        assert memory[name] == pytest.approx(planned[name], rel=0.05), (name, memory, planned)
    assert sum(memory.values()) == pytest.approx(found["memory_peak"], rel=0.02), memory
    assert memory["runtime"] < 2 * planned["runtime"]
    assert found["time"]["forward"]["measured"] > 0 and found["time"]["backward"]["measured"] > 0
