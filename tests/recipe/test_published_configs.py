"""A config.json as published is a preset: the recipe gets the model's shape from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lmworks.cli import recipe_commands
from lmworks.errors import UserError
from lmworks.recipe.derivation.parameters import count_parameters
from lmworks.recipe.loading.load import load_recipe

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                     "rope_type": "llama3"},
}  # fmt: skip
_PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.1-8B": (_LLAMA, 8_030_261_248),
    "Mistral-7B-v0.1": ({
        "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "vocab_size": 32000,
    }, 7_241_732_096),
    "Qwen3-30B-A3B": ({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    }, 30_532_122_624),
    "OLMo-2-1124-7B": ({
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
    }, 7_298_617_344),
}  # fmt: skip


@pytest.mark.parametrize("name", _PUBLISHED)
def test_published_models_have_as_many_parameters_as_they_say(name: str, write: Callable[..., Path], tmp_path: Path) -> None:
    config, parameters = _PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config, indent=2))
    resolved = load_recipe(write(("preset: glm-tiny", f"preset: {tmp_path}")))
    model = resolved.recipe.model
    assert count_parameters(model) == parameters
    assert resolved.origins["model.hidden_size"].kind == "preset"
    assert model.vocab_size == config["vocab_size"] and int(model.max_position_embeddings or 0) == config["max_position_embeddings"]


def test_keys_of_the_recipe_go_over_those_of_the_config(write: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(_LLAMA, indent=2))
    recipe = write(("preset: glm-tiny", f"preset: {path}\n  num_hidden_layers: 2\n  rope: {{factor: 16}}"))
    app = typer.Typer()
    recipe_commands.register(app)
    shown = CliRunner().invoke(app, ["show", str(recipe), "--set", "model.intermediate_size=512"], catch_exceptions=False)
    assert shown.exit_code == 0
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    for said in ("hidden_size: 4096 preset llama", "scaling: llama3 preset llama", "low_freq_factor: 1.0 preset llama"):
        assert any(said in line for line in lines), (said, shown.stdout)
    rope = load_recipe(recipe).recipe.model.rope
    assert (rope.scaling, rope.theta, rope.factor, int(rope.original_max_position_embeddings or 0)) == ("llama3", 500_000, 16, 8192)
    assert load_recipe(recipe).recipe.model.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "config.json is of class GPT2LMHeadModel; lmworks supports DeepseekV3ForCausalLM, "),
        ({"mlp_bias": True}, "config.json has mlp_bias; lmworks does not support biases in feed-forward layers"),
        (
            {"num_attention_heads": 5},
            "config.json describes no model that lmworks has: model.num_key_value_heads 8 must divide model.num_attention_heads 5",
        ),
        ({"num_attention_heads": 0}, "config.json "),
        ({"hidden_size": "wide"}, "config.json "),
    ],
)
def test_a_config_that_is_not_ours_is_refused_in_one_line(
    change: dict[str, Any], said: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_LLAMA | change))
    recipe = write(("preset: glm-tiny", f"preset: {path}"))
    with pytest.raises(UserError) as error:
        load_recipe(recipe)
    assert said in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)
