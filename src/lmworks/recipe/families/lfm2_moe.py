"""LFM2 with experts (8B-A1B, 24B-A2B): as `lfm2`, and after the first layers experts with sigmoid gates and a selection bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmworks.recipe.families import lfm2
from lmworks.recipe.families.family import Family, Gguf, Names, NoClass
from lmworks.recipe.families.olmo2 import heads_are_the_width
from lmworks.recipe.schema.model import Model, Rope

_BLOCK = "model.layers.{i}.feed_forward."
_NAMES: Names = (
    *lfm2.LAYERS,
    *((f"layers.{{i}}.ffn.experts.{ours}", f"{_BLOCK}experts.{{e}}.{theirs}.weight")
      for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))),
    ("layers.{i}.ffn.router.weight", _BLOCK + "gate.weight"), ("layers.{i}.ffn.router.bias", _BLOCK + "expert_bias"),
)  # fmt: skip

_GGUF_NAMES: Names = (
    *((f"layers.{{i}}.ffn.experts.{part}", f"blk.{{i}}.ffn_{part}_exps.weight") for part in ("gate", "up", "down")),
    ("layers.{i}.ffn.router.bias", "blk.{i}.exp_probs_b.bias"),
)


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    moe = model.moe
    assert moe is not None
    return lfm2.layers_to_config(model) | {
        "num_experts": moe.n_routed_experts, "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size, "num_dense_layers": moe.first_k_dense_replace, "use_expert_bias": True,
        "norm_topk_prob": moe.norm_topk_prob, "routed_scaling_factor": moe.routed_scaling_factor,
    }  # fmt: skip


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    moe = {
        "n_routed_experts": config["num_experts"], "num_experts_per_tok": config["num_experts_per_tok"],
        "moe_intermediate_size": config["moe_intermediate_size"], "n_shared_experts": 0,
        "first_k_dense_replace": config["num_dense_layers"], "norm_topk_prob": config["norm_topk_prob"],
        "routed_scaling_factor": config["routed_scaling_factor"],
    }  # fmt: skip
    return lfm2.layers_from_config(config) | {"moe": moe}


def _gguf(model: Model) -> Gguf:
    moe = model.moe
    assert moe is not None
    if not moe.norm_topk_prob:
        raise NoClass("the weights of its chosen experts are not normalized (moe.norm_topk_prob), and llama.cpp's lfm2moe normalizes them")
    if moe.routed_scaling_factor != 1:
        raise NoClass("its routed output is scaled (moe.routed_scaling_factor), and that of llama.cpp's lfm2moe is not")
    if not model.tie_word_embeddings:
        raise NoClass("its head is a matrix of its own (tie_word_embeddings), which files of llama.cpp's lfm2moe do not have")
    metadata = {
        "expert_count": moe.n_routed_experts, "expert_used_count": moe.num_experts_per_tok,
        "expert_feed_forward_length": moe.moe_intermediate_size, "leading_dense_block_count": moe.first_k_dense_replace,
        "expert_gating_func": "SIGMOID",
    }  # fmt: skip
    return replace(lfm2.conv_gguf(model, "lfm2moe", metadata), names=_GGUF_NAMES)


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    moe = {
        "n_routed_experts": values["expert_count"], "num_experts_per_tok": values["expert_used_count"],
        "moe_intermediate_size": values["expert_feed_forward_length"], "n_shared_experts": 0,
        "first_k_dense_replace": values.get("leading_dense_block_count", 0),
    }  # fmt: skip
    return lfm2.conv_from_gguf(values) | {"moe": moe}


FAMILY = Family(
    name="Lfm2MoeForCausalLM", model_type="lfm2_moe",
    about="hybrid: gated short convolutions and attention, experts (sigmoid gates); heads x head_dim is the width; "
    "vLLM reads the embedding as the head",
    names=_NAMES,
    defaults=lfm2.DEFAULTS | {
        "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts_per_tok": 4,
        "num_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    },
    fixed=lfm2.FIXED | {"use_expert_bias": (True,)}, ignored=lfm2.IGNORED, omits=lfm2.OMITS, rope_theta=1_000_000.0,
    requires=frozenset({"experts", "short convolutions", "QK norm"}), allows=frozenset({"selection bias", "routed scale"}),
    differs=heads_are_the_width, to_config=_to_config, from_config=_from_config,
    architectures=("lfm2moe",), gguf=_gguf, from_gguf=_from_gguf,
    without_gguf="models without a layer of attention or with a head of their own, weights of experts not normalized or scaled",
)  # fmt: skip
