"""The recipe of docs/tune-and-align.md, at tiny size, from the command line to the evaluation's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Lmworks

from docs.pages import blocks
from lmworks.metrics.log import read
from lmworks.train.load import final_model
from tiny_run import Tiny

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
