"""Shared by several families: keys of config.json, the weight names of Llama, RoPE parameters, experts, sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families.family import Family, Gguf, Names, NoClass
from lmworks.recipe.schema.model import Model, Moe, Rope

_PARTS = ("gate", "up", "down")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_SCALINGS = ("default", "linear", "yarn", "llama3")

ENDS: Names = (
    ("embedding.weight", "model.embed_tokens.weight"), ("norm.weight", "model.norm.weight"), ("head.weight", "lm_head.weight"),
)  # fmt: skip
PRE_NORMS: Names = (
    ("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    ("layers.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
)
PROJECTIONS: Names = tuple(
    (f"layers.{{i}}.attention.{ours}.{kind}", f"model.layers.{{i}}.self_attn.{theirs}_proj.{kind}")
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")) for kind in ("weight", "bias")
)  # fmt: skip
QK_NORMS: Names = (
    ("layers.{i}.attention.query_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
    ("layers.{i}.attention.key_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
)
FFN: Names = tuple((f"layers.{{i}}.ffn.{part}.weight", f"model.layers.{{i}}.mlp.{part}_proj.weight") for part in _PARTS)
EXPERTS: Names = (
    *((f"layers.{{i}}.ffn.experts.{part}", f"model.layers.{{i}}.mlp.experts.{{e}}.{part}_proj.weight") for part in _PARTS),
    ("layers.{i}.ffn.router.weight", "model.layers.{i}.mlp.gate.weight"),
)
SHARED_EXPERTS: Names = tuple(
    (f"layers.{{i}}.ffn.shared.{part}.weight", f"model.layers.{{i}}.mlp.shared_experts.{part}_proj.weight") for part in _PARTS
)
SELECTION_BIAS: Names = (("layers.{i}.ffn.router.bias", "model.layers.{i}.mlp.gate.e_score_correction_bias"),)
MTP: Names = (
    ("mtp.{i}.embedding_norm.weight", "model.layers.{i}.enorm.weight"),
    ("mtp.{i}.hidden_norm.weight", "model.layers.{i}.hnorm.weight"),
    ("mtp.{i}.projection.weight", "model.layers.{i}.eh_proj.weight"),
    ("mtp.{i}.norm.weight", "model.layers.{i}.shared_head.norm.weight"),
)
LLAMA: Names = (*ENDS, *PRE_NORMS, *PROJECTIONS, *FFN)


def to_config(family: Family, model: Model, rope: Rope) -> dict[str, Any]:
    """The keys of config.json that all families share, without token ids."""
    config: dict[str, Any] = {
        "architectures": [family.name], "model_type": family.model_type, "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size, "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads, "head_dim": model.head_dim, "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_eps,
        "initializer_range": model.initializer_range, "max_position_embeddings": int(model.max_position_embeddings or 2048),
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_dropout": model.attention_dropout, "attention_bias": model.attention_bias, "use_cache": True,
        "rope_parameters": rope_parameters(family, model, rope),
    }  # fmt: skip
    return {key: value for key, value in config.items() if key not in family.omits}


def rope_parameters(family: Family, model: Model, rope: Rope) -> dict[str, Any]:
    """`rope_parameters` of config.json."""
    theta = rope.theta
    if rope.scaling == "ntk":  # expressed as a larger base
        rotated = model.mla.qk_rope_head_dim if model.mla else int((model.head_dim or 0) * rope.partial_rotary_factor)
        theta = rope.theta * rope.factor ** (rotated / (rotated - 2))
    parameters: dict[str, Any] = {"rope_type": "default" if rope.scaling in ("none", "ntk") else rope.scaling, "rope_theta": theta}
    if family.has("partial RoPE"):
        parameters["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.scaling in ("linear", "yarn", "llama3"):
        parameters["factor"] = rope.factor
    if rope.scaling in ("yarn", "llama3"):
        assert rope.original_max_position_embeddings is not None
        parameters["original_max_position_embeddings"] = int(rope.original_max_position_embeddings)
    if rope.scaling == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if model.mla is not None:
            parameters |= {"mscale": 1.0, "mscale_all_dim": 1.0}  # scales the whole attention score
    if rope.scaling == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return parameters


def from_config(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """Values of `Model` from the keys of config.json that all families share. Raises `UserError` for unsupported options and `KeyError` for
    missing keys."""
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UserError(f"config.json has hidden_act {activation}; lmworks supports silu")
    if config.get("attention_bias") and not family.has("biases"):
        raise UserError(f"config.json has attention_bias, which in {family.name} includes an output bias; lmworks does not support that")
    if config.get("mlp_bias"):
        raise UserError("config.json has mlp_bias; lmworks does not support biases in feed-forward layers")
    heads = config["num_attention_heads"]
    return {
        "vocab_size": config["vocab_size"], "hidden_size": config["hidden_size"], "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "intermediate_size": config["intermediate_size"],
        "attention_bias": "biases" in family.requires or bool(config.get("attention_bias")),
        "use_qk_norm": "QK norm" in family.requires or (family.has("QK norm") and bool(config.get("use_qk_norm"))),
        "rope": _rope(family, config),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")), "rms_norm_eps": config["rms_norm_eps"],
        "initializer_range": config.get("initializer_range", 0.02),
        "max_position_embeddings": f"{config['max_position_embeddings']} tokens",
    }  # fmt: skip


def _rope(family: Family, config: dict[str, Any]) -> Rope:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_type": given.get("type", "default"), **given}
    theta, kind = rope.get("rope_theta", config.get("rope_theta", 10_000.0)), rope["rope_type"]
    if kind not in _SCALINGS:
        raise UserError(f"config.json has rope_type {kind}; lmworks supports {', '.join(_SCALINGS[:-1])} and {_SCALINGS[-1]}")
    if family.has("MLA") and kind == "yarn" and (rope.get("mscale"), rope.get("mscale_all_dim")) != (1, 1):
        raise UserError("config.json has YaRN with mscale or mscale_all_dim other than 1; lmworks supports only 1, as in DeepSeek-V3")
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5 if family.has("partial RoPE") else 1.0))
    if fraction != 1 and not family.has("partial RoPE"):
        raise UserError(f"config.json has partial_rotary_factor {fraction}, but {family.name} has no such option; lmworks cannot read it")
    factors = {key: rope[key] for key in ("low_freq_factor", "high_freq_factor")} if kind == "llama3" else {}
    return Rope(
        theta=theta, partial_rotary_factor=fraction, scaling="none" if kind == "default" else kind, factor=rope.get("factor", 1.0),
        original_max_position_embeddings=f"{rope['original_max_position_embeddings']} tokens" if kind in ("yarn", "llama3") else None,
        beta_fast=rope.get("beta_fast") or 32.0, beta_slow=rope.get("beta_slow") or 1.0, **factors,
    )  # fmt: skip


def experts_to_config(moe: Moe) -> dict[str, Any]:
    """The keys of experts in DeepSeek-V3 and GLM."""
    return {
        "n_routed_experts": moe.n_routed_experts, "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "n_shared_experts": moe.n_shared_experts, "first_k_dense_replace": moe.first_k_dense_replace, "norm_topk_prob": moe.norm_topk_prob,
        "routed_scaling_factor": moe.routed_scaling_factor, "n_group": moe.n_group, "topk_group": moe.topk_group,
    }  # fmt: skip


def experts_from_config(config: dict[str, Any]) -> dict[str, Any]:
    """`moe`, and `mtp` if the config has it."""
    moe = {
        "n_routed_experts": config["n_routed_experts"], "num_experts_per_tok": config["num_experts_per_tok"],
        "moe_intermediate_size": config["moe_intermediate_size"],
        "n_shared_experts": config["n_shared_experts"], "first_k_dense_replace": config["first_k_dense_replace"],
        "norm_topk_prob": config["norm_topk_prob"],
        "routed_scaling_factor": config["routed_scaling_factor"], "n_group": config.get("n_group", 1),
        "topk_group": config.get("topk_group", 1),
    }  # fmt: skip
    ahead = config.get("num_nextn_predict_layers")
    return {"moe": moe} | ({"mtp": {"num_nextn_predict_layers": ahead}} if ahead else {})


def window_to_config(model: Model, _: Rope | None = None) -> dict[str, Any]:
    """The keys of a sliding window and of the layers that have it."""
    return {
        "use_sliding_window": bool(model.sliding_window), "sliding_window": int(model.sliding_window) if model.sliding_window else None,
        "layer_types": [_SLIDING if model.slides(layer) else _FULL for layer in range(model.num_hidden_layers or 0)],
    }  # fmt: skip


def window_from_config(config: dict[str, Any], default: Callable[[dict[str, Any]], list[bool]]) -> dict[str, Any]:
    """`sliding_window`, and `layer_types` as the shortest repeating pattern; `default` tells which layers have the window if an older
    config.json does not list them.
    """
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        return {}
    layers = config["num_hidden_layers"]
    types = config.get("layer_types") or [_SLIDING if slides else _FULL for slides in default(config)]
    if len(types) != layers or set(types) - {_SLIDING, _FULL}:
        raise UserError(f"config.json has layer_types that are not {layers} of {_SLIDING} and {_FULL}; lmworks cannot read it")
    if _SLIDING not in types:
        return {}
    size = next(size for size in range(1, layers + 1) if all(types[layer] == types[layer % size] for layer in range(layers)))
    return window_of_all_layers(config) | {"layer_types": tuple(types[:size]) if _FULL in types else ()}


def window_of_all_layers(config: dict[str, Any]) -> dict[str, Any]:
    """`sliding_window` of all layers, if there is one."""
    return {"sliding_window": f"{config['sliding_window']} tokens"} if config.get("sliding_window") else {}


def upper_layers_slide(config: dict[str, Any]) -> list[bool]:
    """Qwen's rule for a config.json without layer_types: layers from `max_window_layers` on have the window."""
    return [layer >= config.get("max_window_layers", 28) for layer in range(config["num_hidden_layers"])]


def gguf(model: Model, architecture: str, *, interleaved_rope: bool = False, metadata: dict[str, Any] | None = None) -> Gguf:
    """An architecture of llama.cpp. Raises `NoClass` for options that llama.cpp ignores in all of them."""
    if model.sliding_window:
        raise NoClass("it has a sliding window, which llama.cpp ignores for this architecture")
    if model.rope.scaling == "llama3" and architecture != "llama":
        raise NoClass(f"it has rope.scaling llama3, which llama.cpp supports for its architecture llama and not for {architecture}")
    return Gguf(architecture, interleaved_rope, metadata or {})
