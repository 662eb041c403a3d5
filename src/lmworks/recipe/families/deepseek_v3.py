"""DeepSeek-V3: multi-head latent attention; dense, or with experts as in GLM."""

from __future__ import annotations

from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Family, Gguf, Names, NoClass
from lmworks.recipe.schema.model import Model, Rope

_LATENT_EPS = 1e-6
"""`transformers` normalizes latents with this epsilon and ignores rms_norm_eps; other engines use rms_norm_eps."""

_LATENT: Names = (
    ("layers.{i}.attention.query_down.weight", "model.layers.{i}.self_attn.q_a_proj.weight"),
    ("layers.{i}.attention.query_latent_norm.weight", "model.layers.{i}.self_attn.q_a_layernorm.weight"),
    ("layers.{i}.attention.query_up.weight", "model.layers.{i}.self_attn.q_b_proj.weight"),
    ("layers.{i}.attention.kv_down.weight", "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight"),
    ("layers.{i}.attention.kv_latent_norm.weight", "model.layers.{i}.self_attn.kv_a_layernorm.weight"),
    ("layers.{i}.attention.kv_up.weight", "model.layers.{i}.self_attn.kv_b_proj.weight"),
)


def _differs(model: Model) -> str | None:
    if model.mla and model.mla.rms_norm_eps != _LATENT_EPS:
        return f"its latents are normalized with {model.mla.rms_norm_eps:g} instead of {_LATENT_EPS:g} (mla.rms_norm_eps)"
    if model.moe is not None and not model.moe.n_shared_experts:
        return "it has no shared expert (moe.n_shared_experts)"
    return None


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    mla = model.mla
    assert mla is not None
    experts: dict[str, Any] = {}
    if model.moe is not None:
        experts = common.experts_to_config(model.moe) | {"num_nextn_predict_layers": model.mtp.num_nextn_predict_layers if model.mtp else 0}
    return experts | {
        "q_lora_rank": mla.q_lora_rank, "kv_lora_rank": mla.kv_lora_rank, "qk_rope_head_dim": mla.qk_rope_head_dim,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "v_head_dim": mla.v_head_dim, "rope_interleave": True,
    } | ({} if experts else {"first_k_dense_replace": model.num_hidden_layers, "num_nextn_predict_layers": 0})  # fmt: skip


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    mla = {
        "q_lora_rank": config.get("q_lora_rank"), "kv_lora_rank": config["kv_lora_rank"], "qk_rope_head_dim": config["qk_rope_head_dim"],
        "qk_nope_head_dim": config["qk_nope_head_dim"], "v_head_dim": config["v_head_dim"], "rms_norm_eps": _LATENT_EPS,
    }  # fmt: skip
    values = {
        "mla": mla,
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"],
    }
    dense = config["first_k_dense_replace"] >= config["num_hidden_layers"]
    return values if dense else values | common.experts_from_config(config)


def _gguf(_: Model) -> Gguf:
    raise NoClass("it has latent attention (mla), whose weights llama.cpp needs split and transposed, which lmworks does not support")


FAMILY = Family(
    name="DeepseekV3ForCausalLM", model_type="deepseek_v3", about="latent attention (MLA), dense or with experts; `norm_eps` 1e-6",
    names=(*common.LLAMA, *_LATENT, *common.EXPERTS, *common.SHARED_EXPERTS, *common.SELECTION_BIAS, *common.MTP), mtp=True,
    requires=frozenset({"MLA"}), allows=frozenset({"experts", "shared experts", "selection bias", "expert groups", "routed scale"}),
    differs=_differs, to_config=_to_config, omits=("head_dim",), from_config=_from_config, gguf=_gguf, without_gguf="all",
)  # fmt: skip
