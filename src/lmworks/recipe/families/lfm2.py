"""LFM2 (350M to 2.6B): gated short convolutions in most layers, attention with QK norm in the others, dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families import common
from lmworks.recipe.families.family import Defaults, Extra, Family, Form, Gguf, Names, NoClass, Null, said
from lmworks.recipe.families.olmo2 import heads_are_the_width
from lmworks.recipe.schema.model import Model, Rope

FULL, CONV = "full_attention", "conv"
_OURS, _LAYER = "layers.{i}.short_conv.", "model.layers.{i}."

LAYERS: Names = (
    ("embedding.weight", "model.embed_tokens.weight"), ("norm.weight", "model.embedding_norm.weight"), ("head.weight", "lm_head.weight"),
    ("layers.{i}.attention_norm.weight", _LAYER + "operator_norm.weight"), ("layers.{i}.ffn_norm.weight", _LAYER + "ffn_norm.weight"),
    *((f"layers.{{i}}.attention.{ours}.weight", f"{_LAYER}self_attn.{theirs}.weight")
      for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "out_proj"),
                           ("query_norm", "q_layernorm"), ("key_norm", "k_layernorm"))),
    *((f"{_OURS}{part}.weight", f"{_LAYER}conv.in_proj.weight") for part in ("input_gate", "output_gate", "value")),
    (_OURS + "input_conv.weight", _LAYER + "conv.conv.weight"), (_OURS + "output.weight", _LAYER + "conv.out_proj.weight"),
    *((f"layers.{{i}}.ffn.{part}.weight", f"{_LAYER}feed_forward.{theirs}.weight")
      for part, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))),
)  # fmt: skip
"""All but experts."""
DEFAULTS: Defaults = {
    "vocab_size": 65536, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "initializer_range": 0.02,
    "norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 128_000, "conv_L_cache": 3, "conv_bias": False,
    "layer_types": Null(list), "head_dim": Extra(int), "tie_embedding": Extra(bool),
}  # fmt: skip
FIXED: dict[str, tuple[Any, ...]] = {"conv_bias": (False,), "block_use_swiglu": (True,), "use_pos_enc": (True,)}
IGNORED = (
    "theta", "num_heads", "block_dim", "block_norm_eps", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init",
    "conv_dim", "conv_dim_out", "conv_use_xavier_init", "attention_dropout",
)  # fmt: skip
"""Of published models, which the class does not read: most repeat other keys."""
OMITS = ("head_dim", "hidden_act", "rms_norm_eps", "attention_dropout", "attention_bias", "mlp_bias")


def layers_to_config(model: Model) -> dict[str, Any]:
    """The kinds of layers, the width of the convolutions, and the keys that are named differently."""
    assert model.short_conv is not None
    return {
        "layer_types": [model.layer_type(layer) for layer in range(model.num_hidden_layers or 0)], "conv_bias": False,
        "conv_L_cache": model.short_conv.conv_kernel, "norm_eps": model.rms_norm_eps,
    }  # fmt: skip


def layers_from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`layer_types` as the shortest repeating pattern, `short_conv`, and what all attention of the class has."""
    layers, types = config["num_hidden_layers"], config["layer_types"]
    if types is None:  # as published first
        full = range(layers) if config.get("full_attn_idxs") is None else config["full_attn_idxs"]
        types = [FULL if layer in full else CONV for layer in range(layers)]
    if len(types) != layers or any(one not in (FULL, CONV) for one in types):
        raise UserError(f"config.json has layer_types that are not {layers} of {FULL} and {CONV}; lmworks cannot read it")
    if CONV not in types:
        raise UserError(f"config.json has no layer of {CONV}; lmworks reads this class only with short convolutions")
    tied = config["tie_word_embeddings"] if config["tie_embedding"] is None else config["tie_embedding"]
    return {
        "layer_types": common.repeating(types), "short_conv": {"conv_kernel": config["conv_L_cache"]}, "use_qk_norm": True,
        "rms_norm_eps": config["norm_eps"], "tie_word_embeddings": tied,
    }  # fmt: skip


def conv_gguf(model: Model, architecture: str, metadata: Mapping[str, Any]) -> Gguf:
    """An architecture of llama.cpp with short convolutions. Raises `NoClass` without a layer of attention."""
    layers = range(model.num_hidden_layers or 0)
    assert model.short_conv is not None
    if not any(model.attends(layer) for layer in layers):
        raise NoClass("no layer has attention (layer_types), whose heads llama.cpp wants to know")
    kinds = {"head_count_kv": [model.num_key_value_heads if model.attends(layer) else 0 for layer in layers]}
    found = common.gguf(model, architecture, metadata={"shortconv_l_cache": model.short_conv.conv_kernel, **kinds, **metadata})
    filters = Form(lambda tensor, _: tensor.squeeze(1), lambda tensor, _: tensor.unsqueeze(1))
    return replace(found, forms={_OURS + "input_conv.weight": filters})


def conv_from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """The layers from the metadata of such a file."""
    heads = values.get("attention.head_count_kv")
    types = [FULL if one else CONV for one in (heads if isinstance(heads, list) else [heads])]
    return {"layer_types": common.repeating(types), "short_conv": {"conv_kernel": values["shortconv.l_cache"]}, "use_qk_norm": True}


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    """`intermediate_size` as it is. vLLM reads block_dim and conv_dim, and the converter of llama.cpp all keys of the adjustment."""
    found = layers_to_config(model)
    return found | {
        "full_attn_idxs": [layer for layer, kind in enumerate(found["layer_types"]) if kind == FULL], "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_dim": model.hidden_size, "conv_dim": model.hidden_size,
    }  # fmt: skip


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    return layers_from_config(config) | {"intermediate_size": _width(config)}


def _width(config: Mapping[str, Any]) -> int:
    """The units of a feed-forward block, which the class by default derives from another number: two thirds of it, rounded up."""
    width: int = config["intermediate_size"] if config["block_ff_dim"] is None else config["block_ff_dim"]
    if not config["block_auto_adjust_ff_dim"]:
        return width
    multiple = config["block_multiple_of"]
    if multiple <= 0:
        raise UserError(f"config.json has {said('block_multiple_of', multiple)}, which must be positive")
    return -(-int(config["block_ffn_dim_multiplier"] * int(2 * width / 3)) // multiple) * multiple


FAMILY = Family(
    name="Lfm2ForCausalLM", model_type="lfm2",
    about="hybrid: gated short convolutions and attention, dense; heads x head_dim is the width; "
    "vLLM reads the embedding as the head",
    names=LAYERS,
    defaults=DEFAULTS | {
        "hidden_size": 2560, "intermediate_size": 12288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True, "block_ff_dim": Extra(int), "full_attn_idxs": Null(list),
    },
    fixed=FIXED, ignored=IGNORED, omits=OMITS, rope_theta=1_000_000.0,
    requires=frozenset({"short convolutions", "QK norm"}), differs=heads_are_the_width, to_config=_to_config, from_config=_from_config,
    architectures=("lfm2",), gguf=lambda model: conv_gguf(model, "lfm2", {}), from_gguf=conv_from_gguf,
    without_gguf="models without a layer of attention",
)  # fmt: skip
