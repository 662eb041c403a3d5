"""MiniMax-M2: QK norm over all heads, a part of each head rotated, and experts in all layers with sigmoid gates and a selection bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Extra, Family, Gguf, Names
from lmworks.recipe.schema.model import Model, Rope

_BLOCK = "model.layers.{i}.block_sparse_moe."
_NAMES: Names = (
    *common.ENDS, *common.PRE_NORMS, *common.PROJECTIONS, *common.QK_NORMS,
    *((f"layers.{{i}}.ffn.experts.{ours}", f"{_BLOCK}experts.{{e}}.{theirs}.weight")
      for ours, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3"))),
    ("layers.{i}.ffn.router.weight", f"{_BLOCK}gate.weight"), ("layers.{i}.ffn.router.bias", f"{_BLOCK}e_score_correction_bias"),
)  # fmt: skip


def _differs(model: Model) -> str | None:
    moe = model.moe
    assert moe is not None
    if not moe.norm_topk_prob:
        return "the weights of its chosen experts are not normalized (moe.norm_topk_prob)"
    return common.first_layers_dense(moe)


def _to_config(model: Model, rope: Rope) -> dict[str, Any]:
    moe = model.moe
    assert moe is not None and model.head_dim
    return {
        "num_local_experts": moe.n_routed_experts, "num_experts_per_tok": moe.num_experts_per_tok,
        "intermediate_size": moe.moe_intermediate_size, "router_jitter_noise": 0.0,
        # as in the published config, for programs other than transformers
        "rotary_dim": int(model.head_dim * rope.partial_rotary_factor), "scoring_func": "sigmoid", "use_routing_bias": True,
        "use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0,
    }  # fmt: skip


def _values(count: int, selected: int, size: int) -> dict[str, Any]:
    moe = {
        "n_routed_experts": count, "num_experts_per_tok": selected, "moe_intermediate_size": size, "n_shared_experts": 0,
        "first_k_dense_replace": 0,
    }  # fmt: skip
    return {"moe": moe, "intermediate_size": size, "use_qk_norm": True, "qk_norm_over": "all_heads"}


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    return _values(config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"])


def _gguf(model: Model) -> Gguf:
    moe = model.moe
    assert moe is not None
    metadata = common.softmax_experts_metadata(model) | {
        "expert_feed_forward_length": moe.moe_intermediate_size, "expert_gating_func": "SIGMOID",
    }  # fmt: skip
    return common.gguf(model, "minimax-m2", metadata=metadata)


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    return _values(values["expert_count"], values["expert_used_count"], values["expert_feed_forward_length"])


FAMILY = Family(
    name="MiniMaxM2ForCausalLM", model_type="minimax_m2", about="mixture of experts (sigmoid gates) in all layers, QK norm over all heads",
    names=_NAMES,
    defaults=common.DEFAULTS | {
        "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608, "num_local_experts": 256, "num_experts_per_tok": 8,
        "router_jitter_noise": 0.0, "rotary_dim": Extra(int),
    },
    rope_theta=5_000_000.0, aliases={"num_experts": "num_local_experts"}, omits=("attention_bias",),
    fixed={
        "scoring_func": ("sigmoid",), "use_routing_bias": (True,), "use_qk_norm": (True,), "qk_norm_type": ("per_layer",),
        "shared_intermediate_size": (0,), "router_jitter_noise": (0.0,), "attention_bias": (False,), "sliding_window": (),
        **dict.fromkeys((f"layernorm_{place}_beta" for place in ("full_attention", "linear_attention", "mlp")), (1.0,)),
    },
    ignored=("attn_type_list", "mlp_intermediate_size", "num_mtp_modules", "shared_moe_mode", "use_mtp"),
    requires=frozenset({"experts", "QK norm over all heads"}), allows=frozenset({"partial RoPE", "selection bias"}),
    differs=_differs, to_config=_to_config, from_config=_from_config,
    architectures=("minimax-m2",), gguf=_gguf, from_gguf=_from_gguf, without_gguf="tied embeddings",
)  # fmt: skip
