"""GLM-4.5 and GLM-4.6: sigmoid gates, shared experts, half of each head rotated."""

from __future__ import annotations

from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Extra, Family, Gguf
from lmworks.recipe.schema.model import Model, Rope


def _to_config(model: Model, rope: Rope) -> dict[str, Any]:
    assert model.moe is not None
    return common.experts_to_config(model.moe) | {
        "use_qk_norm": model.use_qk_norm, "num_nextn_predict_layers": model.mtp.num_nextn_predict_layers if model.mtp else 0,
        "partial_rotary_factor": rope.partial_rotary_factor,
    }  # fmt: skip


def _gguf(model: Model) -> Gguf:
    moe = model.moe
    assert moe is not None
    grouped = moe.topk_group < moe.n_group  # llama.cpp rejects groups that are all selected
    metadata = {
        "expert_count": moe.n_routed_experts, "expert_used_count": moe.num_experts_per_tok,
        "expert_feed_forward_length": moe.moe_intermediate_size,
        "expert_shared_count": moe.n_shared_experts, "expert_group_count": moe.n_group if grouped else 1,
        "expert_group_used_count": moe.topk_group if grouped else 1, "leading_dense_block_count": moe.first_k_dense_replace,
        "expert_gating_func": "SIGMOID", "expert_weights_scale": moe.routed_scaling_factor, "expert_weights_norm": moe.norm_topk_prob,
        "nextn_predict_layers": 0,
    }  # fmt: skip
    return common.gguf(model, "glm4moe", metadata=metadata)


FAMILY = Family(
    name="Glm4MoeForCausalLM", model_type="glm4_moe", about="mixture of experts (sigmoid gates, shared experts)",
    names=(*common.LLAMA, *common.QK_NORMS, *common.EXPERTS, *common.SHARED_EXPERTS, *common.SELECTION_BIAS, *common.MTP), mtp=True,
    defaults=common.DEFAULTS | common.EXPERTS_DEFAULTS | {
        "vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": Extra(int), "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": False, "use_qk_norm": False,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    partial_rotary_factor=0.5, fixed=common.EXPERTS_FIXED, aliases=common.EXPERTS_ALIASES,
    requires=frozenset({"experts", "shared experts"}),
    allows=frozenset({"QK norm", "biases", "partial RoPE", "selection bias", "expert groups", "routed scale"}),
    to_config=_to_config, from_config=common.experts_from_config, architectures=("glm4moe",), gguf=_gguf,
    from_gguf=common.experts_from_gguf,
)  # fmt: skip
