"""GLM-4-0414, dense (9B and 32B): norms on both sides, half of each head rotated in neighboring dimensions, gate and up in one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Family, Names

_NORMS: Names = (
    ("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    ("layers.{i}.attention_out_norm.weight", "model.layers.{i}.post_self_attn_layernorm.weight"),
    ("layers.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    ("layers.{i}.ffn_out_norm.weight", "model.layers.{i}.post_mlp_layernorm.weight"),
)


def _from_config(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"norm_position": "both"}


FAMILY = Family(
    name="Glm4ForCausalLM", model_type="glm4", about="dense, norms on both sides of attention and feed-forward",
    names=(*common.ENDS, *_NORMS, *common.PROJECTIONS, *common.JOINED_FFN), interleaved_rope=True,
    defaults=common.DEFAULTS | {
        "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2, "head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07, "attention_bias": True,
    },
    partial_rotary_factor=0.5,
    requires=frozenset({"norms on both sides"}), allows=frozenset({"partial RoPE", "biases"}),
    from_config=_from_config, from_gguf=_from_config, architectures=("glm4",), gguf=partial(common.gguf, architecture="glm4"),
)  # fmt: skip
