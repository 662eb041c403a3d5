"""Mellum 2 (arXiv:2605.31268): as Qwen3-MoE, but some layers have a sliding window and a RoPE of their own, in any pattern."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import ROPE, Family, Gguf, NoClass, Null
from lmworks.recipe.families.qwen3_moe import FAMILY as QWEN3_MOE
from lmworks.recipe.families.qwen3_moe import experts_gguf
from lmworks.recipe.schema.model import Model, Rope

_PERIOD = 4  # llama.cpp's pattern of a file without one


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    moe, experts, window = model.moe, common.qwen_experts_to_config(model), common.window_to_config(model)
    assert moe is not None
    shared = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    return {key: experts[key] for key in shared} | {
        "mlp_layer_types": common.feed_forward_kinds(model.num_hidden_layers or 0, moe.first_k_dense_replace),
        "num_nextn_predict_layers": 0, "sliding_window": window["sliding_window"], "layer_types": window["layer_types"],
    }  # fmt: skip


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    dense = common.first_dense(config, default=0)
    experts = common.qwen_experts_from_config(config | {"mlp_only_layers": list(range(dense))})
    return experts | common.sliding_from_config(config, [False] * config["num_hidden_layers"])


def _gguf(model: Model) -> Gguf:
    common.refuse_other_sliding_rope(model, "mellum")
    return experts_gguf(model, "mellum", metadata=common.sliding_metadata(model), window=True)


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    slides = common.slides_of_pattern(values.get("attention.sliding_window_pattern", _PERIOD), values["block_count"])
    if slides is None:
        raise NoClass("its attention.sliding_window_pattern is neither a period nor one truth value per layer")
    return QWEN3_MOE.from_gguf(values) | common.sliding_from_gguf(values, slides)


FAMILY = Family(
    name="MellumForCausalLM", model_type="mellum",
    about="mixture of experts (softmax gates), QK norm, a RoPE of their own in sliding layers; `moe.balance.method` aux, sinkhorn or none; "
    "multi-token prediction is left out",
    names=QWEN3_MOE.names, zero=QWEN3_MOE.zero, unread=("mtp.",), rope_theta=500_000.0, sliding_rope_theta=10_000.0,
    defaults=common.DEFAULTS | {
        "vocab_size": 98304, "hidden_size": 2304, "intermediate_size": 7168, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "head_dim": 128, "max_position_embeddings": 131072, "attention_bias": False, "sliding_window": Null(int, 1024),
        "layer_types": Null(list), "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896, "norm_topk_prob": True,
        "mlp_layer_types": Null(list), "num_nextn_predict_layers": Null(int),
    },
    fixed=dict.fromkeys(set(ROPE) - {"rope_parameters"}, ()),  # the class reads no older keys of RoPE
    aliases={**QWEN3_MOE.aliases, "num_mtp_layers": "num_nextn_predict_layers"},
    requires=QWEN3_MOE.requires, allows=frozenset({"sliding window", "full-attention layers beside it", "RoPE of sliding layers"}),
    to_config=_to_config, from_config=_from_config,
    architectures=("mellum",), gguf=_gguf, from_gguf=_from_gguf,
    without_gguf="dense layers, weights of experts that are not normalized, other RoPE of sliding layers, tied embeddings",
)  # fmt: skip
