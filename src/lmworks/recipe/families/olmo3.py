"""OLMo 3: as OLMo 2, but three of four layers have a sliding window, and a scaling of RoPE is that of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Family, Gguf, NoClass, Null
from lmworks.recipe.families.olmo2 import FAMILY as OLMO2
from lmworks.recipe.families.olmo2 import heads_are_the_width
from lmworks.recipe.schema.model import Model, Rope

_ALWAYS: dict[str, Any] = {"use_qk_norm": True, "qk_norm_over": "all_heads", "norm_position": "post"}
_THETA = 500_000.0


def _slides(layers: int) -> list[bool]:
    return [(layer + 1) % 4 != 0 for layer in range(layers)]


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    window = common.window_to_config(model)
    return {"sliding_window": window["sliding_window"], "layer_types": window["layer_types"]}


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    return _ALWAYS | common.sliding_from_config(config, _slides(config["num_hidden_layers"]))


def _gguf(model: Model) -> Gguf:
    layers = model.num_hidden_layers or 0
    if [model.slides(layer) for layer in range(layers)] != _slides(layers):
        raise NoClass("its sliding layers are not three of four, the last of which sees everything, as llama.cpp has them for olmo2")
    common.refuse_other_sliding_rope(model, "olmo2")
    return common.gguf(model, "olmo2", metadata=common.sliding_metadata(model), window=True)


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    return _ALWAYS | common.sliding_from_gguf(values, _slides(values["block_count"]))


FAMILY = Family(
    name="Olmo3ForCausalLM", model_type="olmo3",
    about="dense, post-norm, a RoPE of their own in sliding layers; heads x head_dim is the width",
    names=OLMO2.names, rope_theta=_THETA, sliding_rope_theta=_THETA,
    defaults=OLMO2.defaults | {"sliding_window": Null(int, 4096), "layer_types": Null(list)},
    requires=OLMO2.requires, allows=frozenset({"sliding window", "full-attention layers beside it", "RoPE of sliding layers"}),
    differs=heads_are_the_width, to_config=_to_config, omits=("head_dim",), from_config=_from_config,
    architectures=("olmo2",), gguf=_gguf, from_gguf=_from_gguf,
    without_gguf="other patterns of layers, other RoPE of sliding layers, tied embeddings",
)  # fmt: skip
