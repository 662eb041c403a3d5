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
        "global_batch_size": "1Mi",
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
        "tune": {"data": [data], "tokens": "100M", "sequence_length": "4Ki", "global_batch_size": "256Ki"},
        "dpo": {"data": [data], "sequence_length": "4Ki", "pairs_per_step": 30},
        "grpo": {"data": [data | {"reward": "exact"}], "sequence_length": "4Ki", "updates_per_rollout": 2},
    }

    def plan(lora: dict[str, int] | None) -> Done:
        sections = {name: section | ({"lora": lora} if lora else {}) for name, section in stages.items()}
        recipe = tmp_path / "big.yaml"
        recipe.write_text(yaml.safe_dump({"name": "big", "start_from": str(tmp_path / "base"), **sections}), encoding="utf-8")
        return lmworks("plan", recipe, "--cluster", "8xh100", "--json")

    assert "phase tune: TP8, ZeRO-1 needs 133" in plan(None).error
    done = plan({"rank": 16})
    assert done.code == 0, done.err
    made = json.loads(done.out)
    # 2,000 pairs of two rows, 30 in a step; 100 steps of 16 x 8 answers in two updates.
    steps = [(phase["name"], phase["steps"], phase["batch_tokens"]) for phase in made["phases"]]
    assert steps == [("tune", 381, 2**18), ("dpo", 66, 60 * 4096), ("grpo", 200, 64 * 4096)]
    # rank x (rows + columns) of the seven matrices of 80 layers
    matrices = ((8192, 8192), (8192, 1024), (8192, 1024), (8192, 8192), (8192, 28672), (8192, 28672), (28672, 8192))
    adapters = 80 * 16 * sum(map(sum, matrices))
    memory = made["phases"][0]["placed"]["memory"]
    assert (memory["gradients"], memory["optimizer state"]) == (4 * adapters, 8 * adapters)  # AdamW trains them
    assert made["disk"]["checkpoint"] == 12 * adapters
    frozen = next(line for line in made["warnings"] if "low-rank adapters" in line)
    assert frozen.startswith("tune, dpo, grpo: ") and made["flops_parameters"] == pytest.approx(4 * 69.5e9 * made["tokens"], rel=1e-3)
