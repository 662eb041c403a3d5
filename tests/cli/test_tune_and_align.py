"""The recipe of docs/tune-and-align.md, at tiny size, from the command line to the evaluation's model."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from command import Done, Lmworks

from docs.doc_pages import blocks
from lmworks.cli.main import main
from lmworks.launch.launch_dir import LaunchDir
from lmworks.metrics.log import read
from lmworks.pages.read_run import read_run
from lmworks.pages.timeline import timeline
from lmworks.recipe.schema.model import is_adapter
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import events_of
from lmworks.weights.run_models import final_model, load_model
from patience import PATIENCE
from ports import free_port
from rank_pool import FORKS
from tiny_run import Tiny, before_each_step, checkpoint, curve, same_bits

PAGE = Path(__file__).parents[2] / "docs" / "tune-and-align.md"
SMALL = {
    "dpo": {"pairs_per_step": 2, "sequence_length": "64 tokens", "validation_fraction": 0.2},
    "grpo": {"group_size": 2, "prompts_per_step": 2, "steps": 2, "max_new_tokens": 8, "sequence_length": "128 tokens",
    "validation_prompts": 2},
}
REWARD = "def reward(prompt, answer, row):\n    return float(row['answer'] in answer)\n"


@pytest.mark.slow
def test_the_sections_of_the_page_are_run_by_its_commands(
    tiny_copy: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lmworks: Lmworks
) -> None:  # fmt: skip
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    rows = [line for block in blocks(PAGE) if block.language == "text" for line in block.lines if line.startswith("{")]
    pairs = [line for line in rows if "label" not in json.loads(line)]
    assert len(pairs) == 5, "the forms of the page"
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
    recipe["grpo"]["data"][0]["max_rows"] = 8
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
         "global_batch_tokens": "256 tokens"}  # fmt: skip


def _as_a_rank(arguments: list[str], run_dir: Path, port: int) -> None:
    """The command as the only rank of a launch, beside a second one that was last seen 500 seconds ago; at the first step of each stage,
    what Prometheus reads of the ranks is added to a file."""
    heartbeats = LaunchDir.of(run_dir).heartbeats
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def look(step: int) -> None:
        if step == 0:
            Heartbeat(heartbeats, 1).share()
            os.utime(heartbeats / "1.json", (time.time() - 500,) * 2)
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
            silent = {rank: float(value) for rank, value in re.findall(r'lmworks_rank_silent_seconds\{.*rank="(\d)"\} (\S+)', text)}
            with open(run_dir / "silent.jsonl", "a", encoding="utf-8") as handle:
                handle.write(json.dumps(silent) + "\n")

    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, look)
        patch.setattr(sys, "argv", ["lmworks", *arguments])
        main()


def sections(folder: Path, **changes: dict[str, Any]) -> list[str]:
    """Options that make all stages of the tiny recipe short, with changes by stage."""
    rows = {
        "dpo": [{"prompt": f"What is {n} + 1?", "chosen": str(n + 1), "rejected": str(n)} for n in range(6)],
        "grpo": [{"prompt": f"Say {n}", "answer": str(n)} for n in range(6)],
    }
    (folder / "reward.py").write_text("def reward(prompt, answer, row):\n    return len(set(answer)) / max(1, len(answer))\n")
    general = (f"train.phases={json.dumps([SHORT])}", "tune.tokens=256 tokens", "model.max_position_embeddings=128 tokens")
    options = ["--allow", "train", *(word for option in general for word in ("--set", option))]
    for stage, lines in rows.items():
        path = folder / f"{stage}.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        own = {"reward": "python", "file": str(folder / "reward.py")} if stage == "grpo" else {}
        node = SMALL[stage] | {"sequence_length": "64 tokens", "data": [{"name": "own", "kind": "files", "path": str(path)} | own]}
        options += ["--set", f"{stage}={json.dumps(node | changes.get(stage, {}))}"]
    return options


def test_a_reward_that_always_fails_ends_the_run_with_one_line(tiny_copy: Tiny, tmp_path: Path, lmworks: Lmworks) -> None:
    """Its first failure is shown at once, with the line of the user's function; it is in the ledger too."""
    drawn = {"temperature": 4.0, "group_size": 8, "prompts_per_step": 6, "steps": 6, "max_new_tokens": 40, "validation_prompts": 0}
    arguments = sections(tmp_path, grpo=drawn)  # so many and so random that some answers end, and are judged
    (tmp_path / "reward.py").write_text("def reward(prompt, answer, row):\n    return row['points']\n")
    done = lmworks("grpo", tiny_copy.recipe, *arguments, "--set", f"run_dir={tiny_copy.run_dir}")
    error = "KeyError: 'points' (reward.py, line 2: return row['points'])"
    assert done.code != 0
    assert f"grpo.data.own: the reward failed on every answer of 3 steps in a row, last with {error}" in " ".join(done.err.split())
    (told,) = events_of(tiny_copy.run_dir, "reward_failed")
    assert (told["data"], told["reason"]) == ("own", error)
    entries = [entry for day in timeline(read_run(tiny_copy.run_dir))["days"] for entry in day["entries"]]
    assert any(entry["title"] == "Reward failed" and f"grpo.data.own: {error}" in entry["text"] for entry in entries)
    assert "Reward failed" in (tiny_copy.run_dir / "report.html").read_text(encoding="utf-8"), "the page of a run that failed says why"
    lines = [line for line in read(tiny_copy.run_dir / "grpo") if "grpo/failed" in line]
    assert 0 < len(lines) < drawn["steps"] and all(line["grpo/failed"] > 0 for line in lines[:1])
    assert max(line["grpo/mismatch_max"] for line in lines) < 1e-9, "the promise is 1e-6"


def test_every_stage_reports_the_silence_of_ranks(tiny_copy: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    port, run_dir = free_port(), tiny_copy.run_dir
    arguments = ["grpo", str(tiny_copy.recipe), *sections(tmp_path, grpo={"steps": 1})]
    arguments += ["--set", f"run_dir={run_dir}", "--set", f"metrics.prometheus_port={port}"]
    process = FORKS.Process(target=_as_a_rank, args=(arguments, run_dir, port))
    process.start()
    process.join(PATIENCE)
    found = [json.loads(line) for line in (run_dir / "silent.jsonl").read_text().splitlines()]
    assert len(found) == 4, "pretrain, tune, dpo, grpo"
    assert all(set(silent) == {"0", "1"} and silent["0"] < 100 < 499 < silent["1"] for silent in found), found


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_stage_trains_adapters_on_the_merged_weights_of_the_one_before(
    tiny_copy: Tiny, tmp_path: Path, lmworks: Lmworks
) -> None:
    """Checkpoints hold adapters, `grpo` starts at its reference, a run killed in both stages ends with the same bits, and the exported
    adapter names the model that it belongs to."""
    lora = {"rank": 2, "targets": ["all-linear", "experts"]}
    arguments = sections(
        tmp_path, dpo={"lora": lora, "learning_rate": 0.01},
        grpo={
            "lora": lora | {"alpha": 3.0}, "learning_rate": 0.01, "beta": 0.1, "temperature": 2.0, "group_size": 8,
            "prompts_per_step": 4, "steps": 3, "max_new_tokens": 32,  # so many that some answers end, and earn something
        },
    )  # fmt: skip
    arguments += ["--set", f"tune.lora={json.dumps(lora)}", "--set", "train.save_every=1 steps", "--set", "export.huggingface=true"]
    arguments += ["--set", "export.gguf=true"]

    def run(stage: str, run_dir: Path) -> Done:
        return lmworks(stage, tiny_copy.recipe, *arguments, "--set", f"run_dir={run_dir}")

    assert (done := run("tune", tiny_copy.run_dir)).code == 0, done.err
    whole, hit = tiny_copy.copy(tmp_path / "whole").run_dir, tiny_copy.run_dir
    assert (done := run("export", whole)).code == 0, done.err
    for _ in range(2):  # at the second step of dpo, then of grpo
        with pytest.MonkeyPatch.context() as patch:
            before_each_step(patch, lambda step: (_ for _ in ()).throw(Killed) if step == 1 else None)  # type: ignore[misc]
            assert run("grpo", hit).code != 0
    assert (done := run("grpo", hit)).code == 0, done.err

    for stage in ("dpo", "grpo"):
        saved = checkpoint(whole, folder=f"{stage}/checkpoints")
        assert same_bits(saved, checkpoint(hit, folder=f"{stage}/checkpoints")) == []
        assert curve(whole / stage) == curve(hit / stage)
        of_model = [name for name in saved if name.startswith("model/")]
        assert of_model and all(map(is_adapter, of_model))
        assert any(saved[name].any() for name in of_model if name.endswith("B")), "something was learned"
    name = "layers.1.attention.query"
    tuned, aligned, final = (load_model(whole, model).state_dict()[f"{name}.weight"] for model in ("tuned", "dpo", "grpo"))
    for stage, before, after, scale in (("dpo", tuned, aligned, 16.0), ("grpo", aligned, final, 1.5)):
        saved = checkpoint(whole, folder=f"{stage}/checkpoints")
        torch.testing.assert_close(after, before + scale * saved[f"model/{name}.lora.B"] @ saved[f"model/{name}.lora.A"])
    losses = [line["train/loss"] for line in read(whole / "dpo") if "train/loss" in line]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5), "the policy is the reference"
    divergences = [line["grpo/divergence"] for line in read(whole / "grpo") if "grpo/divergence" in line]
    assert divergences[0] < 1e-9 < divergences[-1], "the policy begins as the reference"
    assert json.loads((whole / "export" / "peft" / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny@dpo"
    adapter = pytest.importorskip("gguf").GGUFReader(whole / "export" / "gguf" / "adapter.gguf")
    assert adapter.get_field("general.name").contents() == "adapter of tiny@dpo"
    assert len(adapter.tensors) == len(of_model)
    again = Tiny(tiny_copy.recipe, whole).copy(tmp_path / "again").run_dir
    shutil.rmtree(again / "grpo")
    arguments += ["--set", f"grpo.lora.init_from={whole / 'export' / 'peft'}", "--set", "grpo.learning_rate=1e-11"]
    assert (done := run("grpo", again)).code == 0, done.err
    continued, given = (checkpoint(one, folder="grpo/checkpoints") for one in (again, whole))
    assert all(torch.allclose(continued[name], given[name], atol=1e-7) for name in of_model)
    card = (whole / "export" / "huggingface" / "README.md").read_text()
    assert "Preference optimization with the loss `sigmoid` followed. Low-rank adapters of rank 2 were trained, and merged." in card


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dpo.lora.rank=64", "dpo.lora.rank 64 is larger than the matrix layers.0.attention.query (32 x 32); use at most 32"),
        ("grpo.lora.dropout=0.1", "grpo.lora.dropout: grpo trains without dropout, so that a token keeps its probability; leave it out"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused_before_anything_is(
    tiny_copy: Tiny, tmp_path: Path, lmworks: Lmworks, change: str, message: str
) -> None:
    done = lmworks("grpo", tiny_copy.recipe, *sections(tmp_path), "--set", f"run_dir={tiny_copy.run_dir}", "--set", change)
    assert message in done.error
    assert not (tiny_copy.run_dir / "checkpoints").exists()


@pytest.mark.slow
def test_two_ranks_align_as_one_process_does(tiny: Tiny, tmp_path: Path, lmworks: Lmworks) -> None:
    """dpo, and grpo with a reference and two updates, whose rollouts the ranks share."""
    changes = {"dpo": {"loss": "ipo"}, "grpo": {"beta": 0.1, "updates_per_rollout": 2, "prompts_per_step": 4, "learning_rate": 1e-3}}
    arguments = sections(tmp_path, **changes)
    alone, launched = tiny.copy(tmp_path / "alone"), tiny.copy(tmp_path / "launched")
    done = lmworks("grpo", alone.recipe, *arguments, "--set", f"run_dir={alone.run_dir}")
    assert done.code == 0, done.err
    command = [sys.executable, "-m", "lmworks.cli.main", "launch", "local", str(launched.recipe), "--ranks", "2", "--to", "grpo"]
    subprocess.run([*command, *arguments, "--set", f"run_dir={launched.run_dir}"], check=True, timeout=PATIENCE)
    for stage, names in (
        ("dpo", ("train/loss", "optim/grad_norm", "dpo/margin", "dpo/accuracy")),
        ("grpo", ("grpo/reward", "grpo/answer_tokens", "grpo/surprise", "grpo/divergence", "optim/grad_norm")),
    ):
        lines, others = curve(launched.run_dir / stage), curve(alone.run_dir / stage)
        for name in names:
            found, expected = ([line[name] for line in some if name in line] for some in (lines, others))
            assert found, name
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-5, err_msg=name)
    assert max(line["grpo/mismatch_max"] for line in curve(launched.run_dir / "grpo")) < 1e-9
