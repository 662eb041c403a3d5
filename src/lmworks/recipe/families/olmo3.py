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
    window = common.window_from_config(config, _slides(config["num_hidden_layers"]))
    own = {} if window else {"sliding_rope": None}  # nothing slides
    return _ALWAYS | window | own


def _gguf(model: Model) -> Gguf:
    layers = model.num_hidden_layers or 0
    known = common.gguf(model, "olmo2", window=True)
    if [model.slides(layer) for layer in range(layers)] != _slides(layers):
        raise NoClass("its sliding layers are not three of four, the last of which sees everything, as llama.cpp has them for olmo2")
    if (model.sliding_rope or model.rope) != Rope(theta=model.rope.theta):
        raise NoClass("its sliding layers have not the plain RoPE with the theta of the others that llama.cpp has for olmo2 (sliding_rope)")
    if model.rope.scaling == "ntk":
        raise NoClass("it has rope.scaling ntk, which is written as a larger theta, and llama.cpp's olmo2 has one theta for all layers")
    metadata = {  # the latter two are what llama.cpp has for olmo2 in any case; its converter writes them
        "sliding_window": int(model.sliding_window or 0), "sliding_window_pattern": _slides(layers), "freq_base_swa": model.rope.theta,
    }  # fmt: skip
    return Gguf(known.architecture, metadata=metadata)


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    size, layers = values.get("attention.sliding_window", 0), values["block_count"]
    if not size:
        raise NoClass("it has no sliding window")
    window = common.window_from_config({"sliding_window": size, "num_hidden_layers": layers, "layer_types": None}, _slides(layers))
    return _ALWAYS | window | {"sliding_rope": {"theta": values.get("rope.freq_base", 10_000.0)}}


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
