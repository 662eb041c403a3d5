"""gpt-oss (arXiv:2508.10925): attention sinks, every second layer with a sliding window, experts with biases and a clamped SwiGLU.

The published weights of experts are MXFP4 (`lmworks.weights.mxfp4`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Family, Gguf, Names, NoClass, Null
from lmworks.recipe.schema.model import Model, Rope

_LAYER = "model.layers.{i}."
_EXPERT = _LAYER + "mlp.experts.{e}."
_NAMES: Names = (
    *common.ENDS, *common.PRE_NORMS, *common.PROJECTIONS, ("layers.{i}.attention.sinks", _LAYER + "self_attn.sinks"),
    ("layers.{i}.ffn.router.weight", _LAYER + "mlp.router.weight"), ("layers.{i}.ffn.router.logit_bias", _LAYER + "mlp.router.bias"),
    *((f"layers.{{i}}.ffn.experts.{part}{ours}", f"{_EXPERT}{part}_proj.{theirs}")
      for part in ("gate", "up", "down") for ours, theirs in (("", "weight"), ("_bias", "bias"))),
)  # fmt: skip
_STACKED = {
    f"{_LAYER}mlp.experts.{stored}{ending}": tuple(f"{_EXPERT}{part}_proj.{kind}" for part in parts)
    for stored, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))
    for ending, kind in (("", "weight"), ("_bias", "bias"))
}
_ALPHA, _LIMIT = 1.702, 7.0
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip


def _slides(layers: int) -> list[bool]:
    return [layer % 2 == 0 for layer in range(layers)]


def _differs(model: Model) -> str | None:
    moe = model.moe
    assert moe is not None
    if model.attention_bias != model.attention_output_bias:
        return "only some projections of its attention have biases (attention_bias, attention_output_bias)"
    if not moe.norm_topk_prob:
        return "the weights of its chosen experts are not normalized (moe.norm_topk_prob)"
    return common.first_layers_dense(moe)


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    moe, window = model.moe, common.window_to_config(model)
    assert moe is not None
    return {
        "num_local_experts": moe.n_routed_experts, "num_experts_per_tok": moe.num_experts_per_tok,
        "intermediate_size": moe.moe_intermediate_size, "swiglu_alpha": moe.swiglu_alpha, "swiglu_limit": moe.swiglu_limit,
        "sliding_window": window["sliding_window"] or int(model.max_position_embeddings or 2048),  # transformers wants one in any case
        "layer_types": window["layer_types"],
    }  # fmt: skip


def _values(experts: tuple[int, int, int], alpha: float, limit: float) -> dict[str, Any]:
    values = common.softmax_experts(*experts, normalized=True)
    values["moe"] |= {"add_bias": True, "swiglu_alpha": alpha, "swiglu_limit": limit}
    return values | {"attention_sinks": True}


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    experts = (config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"])
    values = _values(experts, config["swiglu_alpha"], config["swiglu_limit"])
    return values | {"attention_output_bias": config["attention_bias"]} | common.window_from_config(
        config, _slides(config["num_hidden_layers"])
    )  # fmt: skip


def _gguf(model: Model) -> Gguf:
    moe, layers = model.moe, model.num_hidden_layers or 0
    assert moe is not None
    if [model.slides(layer) for layer in range(layers)] != _slides(layers):
        raise NoClass("its sliding layers are not every second one from the first on, as llama.cpp has them for gpt-oss")
    if not model.attention_bias:
        raise NoClass("its attention has no biases (attention_bias), and llama.cpp's gpt-oss has them")
    if (moe.swiglu_alpha, moe.swiglu_limit) != (_ALPHA, _LIMIT):
        raise NoClass(f"its moe.swiglu_alpha and moe.swiglu_limit are not {_ALPHA} and {_LIMIT:g}, the constants of llama.cpp's gpt-oss")
    metadata = common.softmax_experts_metadata(model) | {
        "expert_feed_forward_length": moe.moe_intermediate_size, "sliding_window": int(model.sliding_window or 0),
    }  # fmt: skip
    return common.gguf(model, "gpt-oss", metadata=metadata, window=True)


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    layers, size = values["block_count"], values["attention.sliding_window"]
    experts = (values["expert_count"], values["expert_used_count"], values["expert_feed_forward_length"])
    window = common.window_from_config({"sliding_window": size, "num_hidden_layers": layers, "layer_types": None}, _slides(layers))
    return _values(experts, _ALPHA, _LIMIT) | {"attention_output_bias": True} | window


FAMILY = Family(
    name="GptOssForCausalLM", model_type="gpt_oss",
    about="mixture of experts (softmax gates) in all layers, attention sinks; MXFP4 is read; `moe.balance.method` aux, sinkhorn or none",
    names=_NAMES, stacked=_STACKED, zero=("layers.{i}.ffn.router.bias",),
    defaults=common.DEFAULTS | {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True,
        "sliding_window": Null(int, 128), "layer_types": Null(list), "num_local_experts": 128, "num_experts_per_tok": 4,
        "swiglu_alpha": _ALPHA, "swiglu_limit": _LIMIT,
    },
    rope_theta=150_000.0, rope_without=_YARN, aliases={"num_experts": "num_local_experts"},
    ignored=("experts_per_token", "initial_context_length"),
    requires=frozenset({"experts", "softmax gates", "attention sinks", "biases of experts", "clamped SwiGLU"}),
    allows=frozenset({"biases", "output bias", "sliding window", "full-attention layers beside it"}),
    differs=_differs, to_config=_to_config, from_config=_from_config,
    architectures=("gpt-oss",), gguf=_gguf, from_gguf=_from_gguf,
    without_gguf="YaRN without rounding (`rope.truncate` false, as published), other patterns of layers, other constants of SwiGLU, "
    "tied embeddings",
)  # fmt: skip
