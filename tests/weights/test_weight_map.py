"""Every tensor of a checkpoint by name, shape and file, without its weights: for the largest models too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from base_models import write_model
from lmworks.errors import UserError
from lmworks.recipe.families.registry import family_of, from_config
from lmworks.recipe.parameters import count_parameters
from lmworks.weights.huggingface import map_weights, wanted_tensors

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
GLM_355B: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92, "first_k_dense_replace": 3,
    "n_routed_experts": 160, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "use_qk_norm": True,
    "attention_bias": True, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5}, "num_nextn_predict_layers": 0,
}  # fmt: skip


def _attention(c: dict[str, Any], at: str) -> dict[str, tuple[int, ...]]:
    hidden, heads, groups, size = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    found = {f"{at}.{name}_proj.weight": (count * size, hidden) for name, count in (("q", heads), ("k", groups), ("v", groups))}
    found |= {name.replace("weight", "bias"): shape[:1] for name, shape in found.items()} if c["attention_bias"] else {}
    found |= {f"{at}.{name}_norm.weight": (size,) for name in "qk"} if c.get("use_qk_norm") else {}
    return found | {f"{at}.o_proj.weight": (hidden, heads * size)}


def _ffn(at: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{at}.gate_proj.weight": (size, hidden), f"{at}.up_proj.weight": (size, hidden), f"{at}.down_proj.weight": (hidden, size)}


def _published(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the files of such a model have them, written out once more."""
    hidden = c["hidden_size"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,), "lm_head.weight": (c["vocab_size"], hidden)
    }  # fmt: skip
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}
        found |= _attention(c, f"{at}.self_attn")
        if "n_routed_experts" not in c or layer < c["first_k_dense_replace"]:
            found |= _ffn(f"{at}.mlp", hidden, c["intermediate_size"])
            continue
        experts, size = c["n_routed_experts"], c["moe_intermediate_size"]
        found |= {f"{at}.mlp.gate.weight": (experts, hidden), f"{at}.mlp.gate.e_score_correction_bias": (experts,)}
        found |= _ffn(f"{at}.mlp.shared_experts", hidden, size)
        for expert in range(experts):
            found |= _ffn(f"{at}.mlp.experts.{expert}", hidden, size)
    return found


@pytest.mark.parametrize(("config", "billions"), [(LLAMA_70B, 70.6), (GLM_355B, 352.8)])
def test_every_tensor_of_the_largest_models_by_name_and_shape(config: dict[str, Any], billions: float) -> None:
    model = from_config(config)
    wanted = wanted_tensors(model, family_of(model))
    assert {name: one.shape for name, one in wanted.items()} == _published(config)
    assert count_parameters(model) / 1e9 == pytest.approx(billions, abs=0.1)


def test_the_file_of_each_tensor(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_model(tmp_path, 64)
    model = from_config(json.loads((tmp_path / "config.json").read_text()))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[part::2]) for part in (0, 1)]
    for number, half in enumerate(halves):
        save_file(half, tmp_path / f"model-{number}.safetensors", metadata={"format": "pt"})
    assert map_weights(tmp_path, model) == {name: tmp_path / f"model-{number}.safetensors" for number in (0, 1) for name in halves[number]}
    more = model.model_copy(update={"vocab_size": 80})
    assert map_weights(tmp_path, more).keys() == tensors.keys()
    save_file(halves[0] | {"model.norm.weight": torch.zeros(31)}, tmp_path / "model-0.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"tensor model\.norm\.weight has shape \(31,\), but the config says \(32,\)"):
        map_weights(tmp_path, model)
