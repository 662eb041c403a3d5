"""The recipe of docs/tune-and-align.md, at tiny size, from the command line to the evaluation's model."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Lmworks

from docs.pages import blocks
from lmworks.cli.main import main
from lmworks.launch.launch_dir import LaunchDir
from lmworks.metrics.log import read
from lmworks.train.load import final_model
from lmworks.watch.heartbeat import Heartbeat
from patience import PATIENCE
from ports import free_port
from rank_pool import FORKS
from tiny_run import Tiny, before_each_step

PAGE = Path(__file__).parents[2] / "docs" / "tune-and-align.md"
SMALL = {
    "dpo": {"pairs_per_step": 2, "sequence_length": "64 tokens", "held_out_fraction": 0.2},
    "grpo": {"group_size": 2, "prompts_per_step": 2, "steps": 2, "max_new_tokens": 8, "sequence_length": "128 tokens", "held_out": 2},
}
REWARD = "def reward(prompt, answer, row):\n    return float(row['answer'] in answer)\n"


@pytest.mark.slow
def test_the_sections_of_the_page_are_run_by_its_commands(
    tiny_copy: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lmworks: Lmworks
) -> None:  # fmt: skip
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    found = {block.language: block.lines for block in blocks(PAGE) if block.language == "json"}
    pairs = [line for line in found["json"] if "label" not in json.loads(line)]
    assert len(pairs) == 3, "the forms of the page"
    (tmp_path / "data").mkdir()
    more = [{"prompt": f"What is {n} + 1?", "chosen": str(n + 1), "rejected": str(n)} for n in range(6)]
    (tmp_path / "data" / "pairs.jsonl").write_text("\n".join([*pairs, *map(json.dumps, more)]) + "\n")
    prompts = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(6)]
    (tmp_path / "data" / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)) + "\n")
    (tmp_path / "data" / "reward.py").write_text(REWARD)
    recipe: dict[str, Any] = yaml.safe_load(tiny_copy.recipe.read_text())
    for block in blocks(PAGE):
        if block.language == "yaml":
            recipe |= yaml.safe_load("\n".join(block.lines))
    for name, changes in SMALL.items():
        recipe[name] |= changes
    recipe["grpo"]["data"][0]["count"] = 8
    recipe["model"]["max_position_embeddings"] = "128 tokens"  # the questions of chain_sum do not fit into the longest phase
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | {"run_dir": str(tiny_copy.run_dir)}))
    for stage in ("tune", "dpo", "grpo"):
        done = lmworks(stage, path)
        assert done.code == 0, done.err
    assert final_model(tiny_copy.run_dir) == "grpo"
    for stage, name in (("dpo", "dpo/margin"), ("grpo", "grpo/reward")):
        assert any(name in line for line in read(tiny_copy.run_dir / stage))
    page = (tiny_copy.run_dir / "report.html").read_text()
    assert "Reward accuracy" in page and "Training against rollout" in page


SHORT = {"name": "short", "tokens": "512 tokens", "mixture": {"code": 0.7, "docs": 0.3}, "sequence_length": "32 tokens",
         "global_batch_size": "256 tokens"}  # fmt: skip


def _as_a_rank(arguments: list[str], run_dir: Path, port: int) -> None:
    """The command as the only rank of a launch, beside a second one that was last seen 500 seconds ago; at the first step of each stage,
    what Prometheus reads of the ranks is added to a file."""
    heartbeats = LaunchDir.of(run_dir).heartbeats
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def look(step: int) -> None:
        if step == 0:
            Heartbeat(heartbeats, 1).beat(5, "forward")
            os.utime(heartbeats / "1.json", (time.time() - 500,) * 2)
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
            silent = {rank: float(value) for rank, value in re.findall(r'lmworks_rank_silent_seconds\{.*rank="(\d)"\} (\S+)', text)}
            with open(run_dir / "silent.jsonl", "a", encoding="utf-8") as handle:
                handle.write(json.dumps(silent) + "\n")

    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, look)
        patch.setattr(sys, "argv", ["lmworks", *arguments])
        main()


def test_every_stage_reports_the_silence_of_ranks(tiny_copy: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    pairs = [{"prompt": f"What is {n} + 1?", "chosen": str(n + 1), "rejected": str(n)} for n in range(6)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)) + "\n")
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"Say {n}", "answer": str(n)}) for n in range(6)) + "\n")
    port, data = free_port(), {"name": "own", "kind": "files"}
    dpo = SMALL["dpo"] | {"data": [data | {"path": str(tmp_path / "pairs.jsonl")}]}
    prompts = data | {"path": str(tmp_path / "prompts.jsonl"), "reward": "exact"}
    grpo = SMALL["grpo"] | {"data": [prompts], "steps": 1, "sequence_length": "64 tokens"}
    options = (f"run_dir={tiny_copy.run_dir}", f"metrics.prometheus_port={port}", f"train.phases={json.dumps([SHORT])}",
               "tune.tokens=256 tokens", f"dpo={json.dumps(dpo)}", f"grpo={json.dumps(grpo)}")  # fmt: skip
    arguments = ["grpo", str(tiny_copy.recipe), "--allow", "train", *(word for option in options for word in ("--set", option))]
    process = FORKS.Process(target=_as_a_rank, args=(arguments, tiny_copy.run_dir, port))
    process.start()
    process.join(PATIENCE)
    found = [json.loads(line) for line in (tiny_copy.run_dir / "silent.jsonl").read_text().splitlines()]
    assert len(found) == 4, "pretrain, tune, dpo, grpo"
    assert all(set(silent) == {"0", "1"} and silent["0"] < 100 < 499 < silent["1"] for silent in found), found
