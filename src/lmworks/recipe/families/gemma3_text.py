"""Gemma 3, the language model (arXiv:2503.19786): norms on both sides, GEGLU, scaled embeddings, five sliding layers to each that sees
everything, and a RoPE for each of the two kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families import common
from lmworks.recipe.families.family import Extra, Family, Gguf, Names, NoClass, Null
from lmworks.recipe.schema.model import Model, Rope

_NORMS: Names = (
    ("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    ("layers.{i}.attention_out_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    ("layers.{i}.ffn_norm.weight", "model.layers.{i}.pre_feedforward_layernorm.weight"),
    ("layers.{i}.ffn_out_norm.weight", "model.layers.{i}.post_feedforward_layernorm.weight"),
)
_ALWAYS: dict[str, Any] = {"use_qk_norm": True, "norm_position": "both", "hidden_act": "gelu_tanh", "scale_embeddings": True}
_PATTERN, _LOCAL_THETA = 6, 10_000.0
_LAYERS_OF_27B = 62  # by which llama.cpp knows the one model with another scale of the scores


def _slides(layers: int, pattern: int = _PATTERN) -> list[bool]:
    return [(layer + 1) % pattern != 0 for layer in range(layers)]


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    window = common.window_to_config(model)
    return {
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_dim,
        "sliding_window": window["sliding_window"] or int(model.max_position_embeddings or 2048),  # transformers wants one in any case
        "layer_types": window["layer_types"],
        "final_logit_softcapping": model.final_logit_softcapping or None, "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }  # fmt: skip


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    pattern = _PATTERN if config["sliding_window_pattern"] is None else config["sliding_window_pattern"]
    cap, scalar = config["final_logit_softcapping"], config["query_pre_attn_scalar"]
    for key, value in (("sliding_window_pattern", pattern), ("final_logit_softcapping", cap), ("query_pre_attn_scalar", scalar)):
        if value is not None and value <= 0:
            raise UserError(f"config.json has {key} {value:g}, which must be positive")
    return _ALWAYS | common.sliding_from_config(config, _slides(config["num_hidden_layers"], pattern)) | {
        "query_pre_attn_scalar": scalar if scalar != config["head_dim"] else None, "final_logit_softcapping": cap or 0.0,
    }  # fmt: skip


def _gguf(model: Model) -> Gguf:
    assert model.num_hidden_layers and model.head_dim and model.hidden_size and model.num_attention_heads
    layers = model.num_hidden_layers
    if model.sliding_window and [model.slides(layer) for layer in range(layers)] != _slides(layers):
        raise NoClass("its sliding layers are not five of six, the last of which sees everything, as llama.cpp has them for gemma3")
    if model.sliding_window and model.sliding_rope != Rope(theta=_LOCAL_THETA):
        raise NoClass("its sliding layers have not the plain RoPE with theta 10,000 (sliding_rope) that llama.cpp has for gemma3")
    if model.rope.scaling not in ("none", "linear", "ntk"):
        raise NoClass(f"it has rope.scaling {model.rope.scaling}, which llama.cpp would apply to the sliding layers of gemma3 too")
    if model.final_logit_softcapping:
        raise NoClass("final_logit_softcapping is on, which llama.cpp has for gemma2 and not for gemma3")
    scalar = _scalar(layers, model.hidden_size, model.num_attention_heads) or model.head_dim
    if (model.query_pre_attn_scalar or model.head_dim) != scalar:
        raise NoClass(f"its query_pre_attn_scalar is not {scalar}, the number that llama.cpp has for gemma3 of {layers} layers")
    window = {"sliding_window": int(model.sliding_window), "freq_base_swa": _LOCAL_THETA} if model.sliding_window else {}
    return Gguf("gemma3", metadata=window)


def _scalar(layers: int, width: int, heads: int) -> int | None:
    return width // heads if layers == _LAYERS_OF_27B else None


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    layers, size = values["block_count"], values.get("attention.sliding_window", 0)
    scalar = {"query_pre_attn_scalar": _scalar(layers, values["embedding_length"], values["attention.head_count"])}
    if not size:
        return _ALWAYS | scalar
    window = common.window_from_config({"sliding_window": size, "num_hidden_layers": layers, "layer_types": None}, _slides(layers))
    return _ALWAYS | scalar | window | {"sliding_rope": {"theta": values.get("rope.freq_base_swa", _LOCAL_THETA)}}


FAMILY = Family(
    name="Gemma3ForCausalLM", model_type="gemma3_text", about="dense, norms on both sides, a RoPE of their own in sliding layers",
    names=(*common.ENDS, *_NORMS, *common.PROJECTIONS, *common.QK_NORMS, *common.FFN), norms_plus_one=True,
    rope_theta=1_000_000.0, sliding_rope_theta=_LOCAL_THETA,
    defaults={key: value for key, value in common.DEFAULTS.items() if key != "hidden_act"} | {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
        "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": Null(float, 0.0), "query_pre_attn_scalar": 256,
        "sliding_window": Null(int, 4096), "layer_types": Null(list), "final_logit_softcapping": Null(float),
        "attn_logit_softcapping": Null(float), "use_bidirectional_attention": Null(bool, False),
        "sliding_window_pattern": Extra(int), "rope_local_base_freq": Extra(float),
    },
    fixed={"hidden_activation": ("gelu_pytorch_tanh",), "attn_logit_softcapping": (), "use_bidirectional_attention": (False,)},
    requires=frozenset({"QK norm", "norms on both sides", "GELU", "scaled embeddings"}),
    allows=frozenset({
        "sliding window", "full-attention layers beside it", "RoPE of sliding layers", "score scale", "logit soft-cap",
    }),
    to_config=_to_config, omits=("hidden_act",), from_config=_from_config,
    architectures=("gemma3",), gguf=_gguf, from_gguf=_from_gguf,
    without_gguf="other patterns of layers, other RoPE of sliding layers, soft-cap",
)  # fmt: skip
