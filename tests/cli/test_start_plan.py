"""A plan of a start of the largest size, from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Done, Lmworks

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
GLM: dict[str, Any] = LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92, "first_k_dense_replace": 3,
    "n_routed_experts": 160, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_attention_heads": 96, "use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize(("config", "total", "active"), [(LLAMA, 70.55e9, 70.55e9), (GLM, 352.8e9, 33.6e9)])
def test_tuning_a_base_model_is_planned_without_its_weights(
    lmworks: Lmworks, tmp_path: Path, config: dict[str, Any], total: float, active: float
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tune = {
        "data": [{"name": "mine", "kind": "files", "path": "chats.jsonl"}], "tokens": "100M", "sequence_length": "8Ki",
        "global_batch_tokens": "1Mi",
    }  # fmt: skip
    recipe = tmp_path / "big.yaml"
    recipe.write_text(yaml.safe_dump({"name": "big", "start_from": str(tmp_path / "base"), "tune": tune}), encoding="utf-8")
    done = lmworks("plan", recipe, "--cluster", "8192xh800", "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert plan["counts"]["total"] == pytest.approx(total, rel=1e-3) and plan["counts"]["active"] == pytest.approx(active, rel=1e-2)
    assert [(phase["name"], phase["steps"], phase["sequence_length"]) for phase in plan["phases"]] == [("tune", 95, 8192)]
    assert "base has no .safetensors file" in lmworks("run", recipe, "--set", f"run_dir={tmp_path / 'run'}").error


def test_adapters_fit_where_whole_weights_do_not_and_every_stage_is_planned(lmworks: Lmworks, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    data = {"name": "mine", "kind": "files", "path": "mine.jsonl"}
    stages: dict[str, dict[str, Any]] = {
        "tune": {"data": [data], "tokens": "100M", "sequence_length": "4Ki", "global_batch_tokens": "256Ki"},
        "dpo": {"data": [data], "sequence_length": "4Ki", "pairs_per_step": 30},
        "grpo": {"data": [data | {"reward": "exact"}], "sequence_length": "4Ki", "updates_per_rollout": 2},
    }

    def plan(lora: dict[str, int] | None, *names: str, cluster: str = "8xh100", precision: str = "auto") -> Done:
        sections = {name: stages[name] | ({"lora": lora} if lora else {}) for name in names}
        recipe = tmp_path / "big.yaml"
        tree = {"name": "big", "start_from": str(tmp_path / "base"), "train": {"precision": precision}, **sections}
        recipe.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return lmworks("plan", recipe, "--cluster", cluster, "--json")

    assert "phase tune: TP8, ZeRO-1 needs 133" in plan(None, "tune").error
    # The 70.55e9 weights in bf16 are 131.4 GiB, and the adapters 0.4: each rank gathers them to draw answers.
    refused = plan({"rank": 16}, "tune", "dpo", "grpo").error
    assert "phase grpo: " in refused and "(gathered weights 131.8, " in refused and "no layout helps" in refused and "slime" in refused
    large = tmp_path / "large.yaml"
    described = "nodes: 1, devices_per_node: 8, device: LARGE, tflops: 989, mfu: 0.4"
    large.write_text(f"{{{described}, memory_gib: 220}}", encoding="utf-8")  # little more than for the answers
    drawn = json.loads(plan({"rank": 16}, "tune", "dpo", "grpo", cluster=str(large)).out)
    # 2,000 pairs of two rows, 30 in a step; 100 steps of 16 x 8 answers in two updates.
    steps = [(phase["name"], phase["steps"], phase["batch_tokens"]) for phase in drawn["phases"]]
    assert steps == [("tune", 381, 2**18), ("dpo", 67, 60 * 4096), ("grpo", 200, 64 * 4096)]
    memory = drawn["phases"][2]["placed"]["memory"]
    # 2 prompts of 8 answers per rank; a key and a value of 8 x 128 numbers in bf16, in 80 layers
    assert memory["KV cache"] == 16 * 80 * 2 * 8 * 128 * 4096 * 2
    large.write_text(f"{{{described}, memory_gib: 1000}}", encoding="utf-8")
    exact = json.loads(plan({"rank": 16}, "grpo", cluster=str(large), precision="fp32").out)["phases"][0]["placed"]["memory"]
    assert exact["KV cache"] == 4 * memory["KV cache"], "a model that computes in fp32 draws in fp64"
    frozen = next(line for line in drawn["warnings"] if "low-rank adapters" in line)
    assert frozen.startswith("tune, dpo, grpo: ") and drawn["flops_parameters"] == pytest.approx(4 * 69.5e9 * drawn["tokens"], rel=1e-3)

    done = plan({"rank": 16}, "tune", "dpo")
    assert done.code == 0, done.err
    made = json.loads(done.out)
    # rank x (rows + columns) of the seven matrices of 80 layers
    matrices = ((8192, 8192), (8192, 1024), (8192, 1024), (8192, 8192), (8192, 28672), (8192, 28672), (28672, 8192))
    adapters = 80 * 16 * sum(map(sum, matrices))
    memory = made["phases"][0]["placed"]["memory"]
    assert drawn["phases"][2]["placed"]["memory"]["gathered weights"] == 2 * (made["counts"]["total"] + adapters)
    assert (memory["gradients"], memory["optimizer state"]) == (4 * adapters, 8 * adapters)  # AdamW trains them
    assert made["disk"]["checkpoint"] == 12 * adapters


@pytest.mark.parametrize(("stage", "cluster", "fits"), [("dpo", "8xh100", False), ("dpo", "64xh100", True), ("grpo", "8192xh800", False)])
def test_glm_with_adapters_fits_64_devices_for_preferences_and_none_for_rollouts(
    lmworks: Lmworks, tmp_path: Path, stage: str, cluster: str, fits: bool
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(GLM), encoding="utf-8")
    data = {"name": "mine", "kind": "files", "path": "mine.jsonl"} | ({"reward": "exact"} if stage == "grpo" else {})
    section = {"data": [data], "sequence_length": "4Ki", "lora": {"rank": 16}}
    if stage == "dpo":
        section["pairs_per_step"] = 128
    recipe = tmp_path / "glm.yaml"
    recipe.write_text(yaml.safe_dump({"name": "glm", "start_from": str(tmp_path / "base"), stage: section}), encoding="utf-8")
    done = lmworks("plan", recipe, "--cluster", cluster, "--json")
    assert (done.code == 0) == fits, done.err
    if fits:
        (phase,) = json.loads(done.out)["phases"]
        assert phase["batch_tokens"] == 2 * 128 * 4096, "two rows per pair"
        assert "gathered weights" not in phase["placed"]["memory"] and phase["placed"]["memory_total"] <= 74.5 * 2**30
    elif stage == "grpo":
        assert "each rank of grpo gathers all weights" in done.error and "no layout helps" in done.error
