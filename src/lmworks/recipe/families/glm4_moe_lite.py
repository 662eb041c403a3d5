"""GLM-4.7-Flash: latent attention and experts as in DeepSeek-V3, whose class computes the same; its config lists the dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.deepseek_v3 import FAMILY as DEEPSEEK
from lmworks.recipe.families.family import Extra, Null


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    return DEEPSEEK.from_config(config | {"first_k_dense_replace": common.first_dense(config, default=1), "head_dim": None})


FAMILY = replace(
    DEEPSEEK, name="Glm4MoeLiteForCausalLM", model_type="glm4_moe_lite", model_types=(), written_as=DEEPSEEK.name, architectures=(),
    about="as `DeepseekV3ForCausalLM`, as which it is written", without_gguf="as `DeepseekV3ForCausalLM`",
    defaults={key: value for key, value in DEEPSEEK.defaults.items() if key not in ("first_k_dense_replace", "head_dim")} | {
        "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47, "num_attention_heads": 20,
        "num_key_value_heads": 20, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "attention_dropout": 0.0,
        "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8, "n_group": 1,
        "topk_group": 1, "q_lora_rank": Null(int, 768), "qk_nope_head_dim": 192, "v_head_dim": 256, "mlp_layer_types": Null(list),
        "num_nextn_predict_layers": Extra(int),
    },
    aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
    ignored=("first_k_dense_replace",), fixed=common.EXPERTS_FIXED, from_config=_from_config,
)  # fmt: skip
