"""DeepSeek-V3: multi-head latent attention; dense, or with experts as in GLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families import common
from lmworks.recipe.families.family import Extra, Family, Gguf, Names, NoClass, Null
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
        experts = common.experts_to_config(model.moe) | {
            "num_nextn_predict_layers": model.mtp.num_nextn_predict_layers if model.mtp else 0,
            # as in the published config: transformers assumes both, vLLM and llama.cpp's converter assume softmax and no bias without them
            "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        }  # fmt: skip
    return experts | {
        "q_lora_rank": mla.q_lora_rank, "kv_lora_rank": mla.kv_lora_rank, "qk_rope_head_dim": mla.qk_rope_head_dim,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "v_head_dim": mla.v_head_dim, "rope_interleave": True,
    } | ({} if experts else {"first_k_dense_replace": model.num_hidden_layers, "num_nextn_predict_layers": 0})  # fmt: skip


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    names = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    mla = {name: config[name] for name in names} | {"rms_norm_eps": _LATENT_EPS}
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    for key, expected in (("head_dim", config["qk_rope_head_dim"]), ("qk_head_dim", width)):  # written by transformers
        if config[key] not in (None, expected):
            raise UserError(f"config.json has {key} {config[key]}, but its other keys say {expected}")
    values = {"mla": mla, "head_dim": width}
    dense = config["first_k_dense_replace"] >= config["num_hidden_layers"]
    return values if dense else values | common.experts_from_config(config)


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    rotated, whole = values["rope.dimension_count"], values["attention.key_length_mla"]
    mla = {
        "q_lora_rank": values.get("attention.q_lora_rank"), "kv_lora_rank": values["attention.kv_lora_rank"],
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": whole - rotated, "v_head_dim": values["attention.value_length_mla"],
        "rms_norm_eps": _LATENT_EPS,
    }  # fmt: skip
    found = {"mla": mla, "num_key_value_heads": values["attention.head_count"], "head_dim": whole}
    dense = values.get("leading_dense_block_count", 0) >= values["block_count"]
    return found if dense else found | common.experts_from_gguf(values)


_LITE = (26, 27)
"""Numbers of layers by which llama.cpp recognizes the models without `q_lora_rank`; no others may be without it, and these must be."""


def _gguf(model: Model) -> Gguf:
    mla, moe = model.mla, model.moe
    assert mla is not None
    if model.rms_norm_eps != mla.rms_norm_eps:
        eps = f"{model.rms_norm_eps:g}, with which llama.cpp would normalize latents too ({mla.rms_norm_eps:g} here)"
        raise NoClass(f"it has rms_norm_eps {eps}")
    if (model.num_hidden_layers in _LITE) == bool(mla.q_lora_rank):
        raise NoClass("it has latent attention (mla), for which llama.cpp decides by the number of layers whether there is a q_lora_rank")
    if model.rope.scaling == "yarn":
        raise NoClass("it has latent attention (mla) with rope.scaling yarn, whose factor of the scores lmworks does not write")
    # llama.cpp computes latent attention as attention with one key-value head, which is the latent and the rotated key
    metadata: dict[str, Any] = {
        "head_count_kv": 1, "key_length": mla.kv_lora_rank + mla.qk_rope_head_dim, "value_length": mla.kv_lora_rank,
        "key_length_mla": mla.qk_nope_head_dim + mla.qk_rope_head_dim, "value_length_mla": mla.v_head_dim,
        "kv_lora_rank": mla.kv_lora_rank, "rope_dimension_count": mla.qk_rope_head_dim,
        "leading_dense_block_count": moe.first_k_dense_replace if moe else model.num_hidden_layers,
        "expert_feed_forward_length": moe.moe_intermediate_size if moe else model.intermediate_size,
        "expert_shared_count": moe.n_shared_experts if moe else 0,
    } | ({"q_lora_rank": mla.q_lora_rank} if mla.q_lora_rank else {})  # fmt: skip
    if moe is not None:
        grouped = moe.topk_group < moe.n_group  # llama.cpp rejects groups that are all selected
        metadata |= {
            "expert_count": moe.n_routed_experts, "expert_used_count": moe.num_experts_per_tok, "expert_gating_func": "SIGMOID",
            "expert_group_count": moe.n_group if grouped else 1, "expert_group_used_count": moe.topk_group if grouped else 1,
            "expert_weights_scale": moe.routed_scaling_factor, "expert_weights_norm": moe.norm_topk_prob,
        }  # fmt: skip
    return common.gguf(model, "deepseek2", metadata=metadata)


FAMILY = Family(
    name="DeepseekV3ForCausalLM", model_type="deepseek_v3", about="latent attention (MLA), dense or with experts; `rms_norm_eps` 1e-6",
    names=(*common.LLAMA, *_LATENT, *common.EXPERTS, *common.SHARED_EXPERTS, *common.SELECTION_BIAS, *common.MTP), mtp=True,
    defaults=common.DEFAULTS | common.EXPERTS_DEFAULTS | {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": Null(int, 128), "max_position_embeddings": 4096, "attention_bias": False,
        "attention_dropout": Null(float, 0.0), "moe_intermediate_size": 2048, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
        "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": Null(int, 1536),
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "rope_interleave": True,
        "head_dim": Extra(int), "qk_head_dim": Extra(int),
    },
    fixed=common.EXPERTS_FIXED, aliases=common.EXPERTS_ALIASES, model_types=("kimi_k2",),
    requires=frozenset({"MLA"}), allows=frozenset({"experts", "shared experts", "selection bias", "expert groups", "routed scale"}),
    differs=_differs, to_config=_to_config, omits=("head_dim",), from_config=_from_config, architectures=("deepseek2",), gguf=_gguf,
    from_gguf=_from_gguf,
    without_gguf="rope.scaling yarn; other rms_norm_eps than 1e-6; without q_lora_rank but with 26 or 27 layers",
)  # fmt: skip
