"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): QK norm, softmax gates, no shared expert and no selection bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Extra, Family, Gguf, NoClass, Null
from lmworks.recipe.schema.model import Model, Rope


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    window = model.sliding_window
    return common.qwen_experts_to_config(model) | {"use_sliding_window": bool(window), "sliding_window": int(window) if window else None}


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    return common.qwen_experts_from_config(config) | common.window_of_all_layers(config)


def experts_gguf(model: Model, architecture: str = "qwen3moe", *, metadata: Mapping[str, Any] | None = None, window: bool = False) -> Gguf:
    """An architecture of llama.cpp that has the tensors and the experts of qwen3moe."""
    moe = model.moe
    assert moe is not None
    if moe.first_k_dense_replace:
        raise NoClass(
            f"its first layers are dense (moe.first_k_dense_replace {moe.first_k_dense_replace}), and llama.cpp's {architecture} has "
            f"experts in all layers"
        )
    if not moe.norm_topk_prob:
        raise NoClass(
            f"the weights of its chosen experts are not normalized (moe.norm_topk_prob), and llama.cpp's {architecture} normalizes them"
        )
    experts = {
        "expert_count": moe.n_routed_experts,
        "expert_used_count": moe.num_experts_per_tok,
        "expert_feed_forward_length": moe.moe_intermediate_size,
    }
    known = common.gguf(model, architecture, metadata=experts | dict(metadata or {}), window=window)
    return replace(known, names_of="qwen3moe")


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    moe = {
        "n_routed_experts": values["expert_count"], "num_experts_per_tok": values["expert_used_count"],
        "moe_intermediate_size": values["expert_feed_forward_length"], "n_shared_experts": 0, "first_k_dense_replace": 0,
        "scoring_func": "softmax", "norm_topk_prob": True, "balance": {"method": "aux"},
    }  # fmt: skip
    return {"moe": moe}


FAMILY = Family(
    name="Qwen3MoeForCausalLM", model_type="qwen3_moe",
    about="mixture of experts (softmax gates), QK norm; `moe.balance.method` aux, sinkhorn or none",
    names=(*common.LLAMA, *common.QK_NORMS, *common.EXPERTS), zero=("layers.{i}.ffn.router.bias",),
    defaults=common.DEFAULTS | {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        "head_dim": Extra(int), "max_position_embeddings": 32768, "attention_bias": False,
        "use_sliding_window": False, "sliding_window": Null(int, 4096), "decoder_sparse_step": 1, "mlp_only_layers": Null(list),
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
    },
    aliases={"num_local_experts": "num_experts"}, ignored=("max_window_layers",),
    fixed={"qkv_bias": (False,), "use_qk_norm": (True,), "shared_expert_intermediate_size": (0,)},
    requires=frozenset({"experts", "softmax gates", "QK norm"}), allows=frozenset({"sliding window"}),
    to_config=_to_config, from_config=_from_config,
    architectures=("qwen3moe",), gguf=experts_gguf, from_gguf=_from_gguf,
    without_gguf="dense layers, weights of experts that are not normalized, sliding window",
)  # fmt: skip
