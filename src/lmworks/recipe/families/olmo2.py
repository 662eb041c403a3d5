"""OLMo 2: post-norm layers, and QK norm over all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Extra, Family, Names, NoClass, Null
from lmworks.recipe.schema.model import Model

_POST_NORMS: Names = (
    ("layers.{i}.attention_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    ("layers.{i}.ffn_norm.weight", "model.layers.{i}.post_feedforward_layernorm.weight"),
)


def heads_are_the_width(model: Model) -> str | None:
    """Why a class without `head_dim` does not express the model, or None."""
    assert model.num_attention_heads and model.head_dim
    if model.num_attention_heads * model.head_dim != model.hidden_size:
        return f"heads x head_dim is {model.num_attention_heads * model.head_dim} and not hidden_size {model.hidden_size}"
    return None


def _from_config(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_qk_norm": True, "qk_norm_over": "all_heads", "norm_position": "post"}


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    if values.get("attention.sliding_window", 0):
        raise NoClass("it has a sliding window")  # OLMo 3
    return _from_config(values)


FAMILY = Family(
    name="Olmo2ForCausalLM", model_type="olmo2", about="dense, post-norm; heads x head_dim is the width",
    names=(*common.ENDS, *_POST_NORMS, *common.PROJECTIONS, *common.QK_NORMS, *common.FFN),
    defaults=common.DEFAULTS | {
        "vocab_size": 50304, "intermediate_size": 11008, "num_key_value_heads": Null(int), "head_dim": Extra(int),
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False,
    },
    requires=frozenset({"post-norm", "QK norm over all heads"}), differs=heads_are_the_width, omits=("head_dim",), from_config=_from_config,
    architectures=("olmo2",), from_gguf=_from_gguf, gguf=partial(common.gguf, architecture="olmo2"),
    without_gguf="tied embeddings",
)  # fmt: skip
