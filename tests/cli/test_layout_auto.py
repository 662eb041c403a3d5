"""`layout: auto` where a run is started: chosen once, the same for all ranks, and kept when the run goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Done, Lmworks

from lmworks.launch.launcher import Launch, launch_local
from lmworks.launch.torchrun import CountRange
from lmworks.recipe.load import load_recipe

CLUSTER = """
nodes: 2
devices_per_node: 4
device: A small one
tflops: 10
memory_gib: {memory}
layout: auto
"""


def chosen(text: str) -> dict[str, str]:
    return dict(re.findall(r"--set layout\.(\w+)=(\S+)", text))


@pytest.mark.parametrize("way", ["local", "slurm"])
def test_every_rank_is_told_the_layout_that_was_chosen(
    lmworks: Lmworks, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "roomy.yaml").write_text(CLUSTER.format(memory=40))
    batches = (
        "--set",
        "train.phases.general.global_batch_tokens=8Ki",
        "--set",
        "train.phases.anneal.global_batch_tokens=8Ki",
    )  # 8 sequences at least
    run = ("--set", f"run_dir={tmp_path / 'run'}", *batches, "--dry-run")
    done = lmworks("launch", way, "quickstart", "--cluster", tmp_path / "roomy.yaml", *run)
    assert done.code == 0, done.err
    ranks = "4" if way == "local" else "8"
    last = chosen(done.out)
    assert (last["auto"], last["dp_shard"], last["tp"], last["pp"]) == ("false", ranks, "1", "1")
    why = rf"layout: DP{ranks}, ZeRO-1: the smallest pipeline, context, tensor and expert parallelism .* {ranks} x A small one"
    assert re.search(why, done.err), "beside the script, which is on standard output"
    assert "--set train.micro_batch_sequences=" in done.out
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("RANK", "1")
    again = lmworks("launch", way, "quickstart", "--cluster", tmp_path / "roomy.yaml", *run)
    assert chosen(again.out) == chosen(done.out) and "layout:" not in again.err, "one rank says it"


def test_a_run_that_has_begun_is_launched_as_it_began(lmworks: Lmworks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    resolved = load_recipe("quickstart", ["layout={tp: 2, dp_shard: 2}", f"run_dir={run}"])
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    resolved.save(run)
    for ranks in (4, 6):
        done = lmworks("launch", "local", "quickstart", "--set", "layout=auto", "--set", f"run_dir={run}", "--ranks", ranks, "--dry-run")
        assert done.code == 0, done.err
        assert {axis: chosen(done.out)[axis] for axis in ("tp", "dp_shard", "ep")} == {"tp": "2", "dp_shard": "2", "ep": "1"}
        assert "as the run began" in done.err
    refused = lmworks("launch", "local", "quickstart", "--set", "layout=auto", "--set", f"run_dir={run}", "--ranks", 3, "--dry-run")
    assert "3 ranks are not a multiple of 2 (layout tp 2)" in refused.error


def test_a_recipe_that_only_tunes_gets_a_layout_for_its_stages(lmworks: Lmworks, tmp_path: Path) -> None:
    base = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(base), encoding="utf-8")
    recipe: dict[str, Any] = {"name": "tuned", "start_from": str(tmp_path / "base"), "layout": "auto", "run_dir": str(tmp_path / "run")}
    data = [{"name": "mine", "kind": "files", "path": "mine.jsonl"}]

    def launch(sections: dict[str, Any]) -> Done:
        (tmp_path / "tuned.yaml").write_text(yaml.safe_dump(recipe | sections), encoding="utf-8")
        return lmworks("launch", "local", tmp_path / "tuned.yaml", "--ranks", 2, "--dry-run")

    uneven = {"dpo": {"data": data, "loss": "kto", "pairs_per_step": 5}}
    for sections in ({"tune": {"data": data}}, {"dpo": {"data": data, "lora": {}}}, uneven):
        done = launch(sections)
        assert done.code == 0, done.err
        assert chosen(done.out)["dp_shard"] == "2"
    assert "layout: auto: the recipe trains nothing" in launch({}).error


def test_the_number_of_ranks_must_be_known(lmworks: Lmworks, tmp_path: Path) -> None:
    done = lmworks("launch", "local", "quickstart", "--set", "layout=auto", "--set", f"run_dir={tmp_path}", "--dry-run")
    assert "layout: auto needs the number of ranks: add --ranks N" in done.error


@pytest.mark.parametrize(
    ("cores", "sequences", "ranks"), [(2, 16, 2), (1, 16, 1), (6, 16, 6), (7, 16, 6), (7, 8, 4), (3, 8, 3), (64, 12, 12)]
)
def test_ranks_auto_takes_the_fewest_cores_that_train_fastest(
    lmworks: Lmworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, sequences: int, ranks: int
) -> None:  # fmt: skip
    """Three rounds of a step on six or on seven ranks, four on four. Only data is divided on a CPU, though sharded heads would
    occupy all 64."""
    monkeypatch.setattr("lmworks.host.machine.cores", lambda: cores)
    batches = [f"train.phases.{phase}.global_batch_tokens={sequences * length}" for phase, length in (("general", 256), ("anneal", 1024))]
    words = [word for one in (*batches, f"run_dir={tmp_path / 'run'}") for word in ("--set", one)]
    done = lmworks("launch", "local", "quickstart", "--ranks", "auto", *words, "--dry-run")
    assert done.code == 0, done.err
    assert f"--nproc-per-node={ranks} " in done.out
    assert (chosen(done.out)["dp_shard"], chosen(done.out)["tp"]) == (str(ranks), "1")
    assert f"ranks: {ranks} of {cores} CPU cores" in done.err


def test_ranks_auto_leaves_a_layout_that_is_written_alone(lmworks: Lmworks, tmp_path: Path) -> None:
    asked = ("launch", "local", "quickstart", "--ranks", "auto", "--dry-run", "--set", f"run_dir={tmp_path / 'run'}")
    assert "write layout: auto, or leave --ranks out" in lmworks(*asked, "--set", "layout.dp_shard=2").error
    assert lmworks(*asked, "--set", "layout=auto").code == 0


@pytest.mark.parametrize(
    ("cores", "more", "launched"),
    [(2, (), True), (8, ("--to", "tune"), True), (1, (), False), (2, ("--set", "layout.tp=2"), False), (2, ("--allow", "layout"), False)],
)
def test_run_goes_on_with_the_ranks_that_a_run_began_with(
    lmworks: Lmworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, more: tuple[str, ...], launched: bool
) -> None:
    """Where this machine has as many devices, and nobody asks for another layout: then the process goes on alone, or says what changed."""
    run, begun = tmp_path / "run", []
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    load_recipe("quickstart", ["layout.dp_shard=2", f"run_dir={run}"]).save(run)
    monkeypatch.setattr("lmworks.host.machine.cores", lambda: cores)
    monkeypatch.setattr(Launch, "supervise", lambda launch: begun.append(launch) or 5)
    monkeypatch.setattr("lmworks.run.runner.run_stages", lambda *_, **__: run)
    monkeypatch.setattr("lmworks.run.prediction.summary", lambda _: "")
    done = lmworks("run", "quickstart", "--set", f"run_dir={run}", *more)
    if not launched:
        assert (done.code, begun) == (0, []), done.err
        return
    (launch,) = begun
    words = " ".join(launch.arguments)
    assert done.code == 5, "that of the launch"
    assert launch.hosts[0].slots == 2 and "layout.dp_shard=2" in words and words.startswith("tune" if more else "run")
    assert "ranks: 2, as the run began" in done.err


def test_ranks_come_and_go_by_what_the_model_axes_leave(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", ["layout={tp: 2, dp_shard: 2}", f"run_dir={tmp_path}"]).recipe
    assert [host.slots for host in launch_local(recipe, tmp_path, CountRange(2, 6), ["pretrain"]).hosts] == [2, 2, 2]
