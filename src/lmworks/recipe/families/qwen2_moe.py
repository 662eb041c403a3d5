"""Qwen1.5-MoE and Qwen2-MoE: biases on queries, keys and values, softmax gates, and a shared expert with a gate of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Extra, Family, Gguf, NoClass, Null
from lmworks.recipe.families.olmo2 import heads_are_the_width
from lmworks.recipe.schema.model import Model, Rope


def _to_config(model: Model, rope: Rope) -> dict[str, Any]:
    return common.qwen_experts_to_config(model) | common.window_to_config(model, rope) | {"qkv_bias": True}


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    slides = [layer % 2 == 0 and layer < config["max_window_layers"] for layer in range(config["num_hidden_layers"])]
    return common.qwen_experts_from_config(config) | common.window_from_config(config, slides)


def _gguf(model: Model) -> Gguf:
    moe = model.moe
    assert moe is not None
    if moe.first_k_dense_replace or moe.norm_topk_prob:
        raise NoClass("its first layers are dense, or the weights of its experts are normalized, unlike those of llama.cpp's qwen2moe")
    metadata = {
        "expert_count": moe.n_routed_experts, "expert_used_count": moe.num_experts_per_tok,
        "expert_feed_forward_length": moe.moe_intermediate_size,
        "expert_shared_feed_forward_length": moe.n_shared_experts * moe.moe_intermediate_size,
    }  # fmt: skip
    return common.gguf(model, "qwen2moe", metadata=metadata)


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    return common.qwen_experts_from_config({
        "num_experts": values["expert_count"], "num_experts_per_tok": values["expert_used_count"],
        "moe_intermediate_size": values["expert_feed_forward_length"],
        "shared_expert_intermediate_size": values["expert_shared_feed_forward_length"], "norm_topk_prob": False,
    })  # fmt: skip


FAMILY = Family(
    name="Qwen2MoeForCausalLM", model_type="qwen2_moe",
    about="mixture of experts (softmax gates) and a gated shared one, biases; heads x head_dim is the width; `moe.balance.method` aux, "
    "sinkhorn or none",
    names=(*common.LLAMA, *common.EXPERTS, *common.GATED_SHARED_EXPERT), zero=("layers.{i}.ffn.router.bias",),
    defaults=common.DEFAULTS | common.WINDOW | {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": Null(int, 16), "head_dim": Extra(int), "max_position_embeddings": 32768, "decoder_sparse_step": 1,
        "mlp_only_layers": Null(list), "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
        "num_experts": 60, "norm_topk_prob": False, "qkv_bias": True,
    },
    ignored=("attention_bias",), fixed={"qkv_bias": (True,)},
    requires=frozenset({"experts", "shared experts", "softmax gates", "gate of shared experts", "biases"}),
    allows=frozenset({"sliding window", "full-attention layers beside it"}),
    differs=heads_are_the_width, to_config=_to_config, omits=("head_dim",), from_config=_from_config,
    architectures=("qwen2moe",), gguf=_gguf, from_gguf=_from_gguf,
    without_gguf="dense layers, weights of experts that are normalized, sliding window, tied embeddings",
)  # fmt: skip
