"""Phi-3 and Phi-4: Llama with queries, keys and values in one matrix, and gate and up in another.

LongRoPE (arXiv:2402.13753) is refused: it rotates all positions otherwise once a row is longer than the original length, which keys in a
cache cannot follow.
"""

from __future__ import annotations

from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Extra, Family, Gguf, Names, Null
from lmworks.recipe.families.olmo2 import heads_are_the_width
from lmworks.recipe.schema.model import Model, Rope

_NAMES: Names = (
    *common.ENDS, *common.PRE_NORMS,
    *((f"layers.{{i}}.attention.{part}.weight", "model.layers.{i}.self_attn.qkv_proj.weight") for part in ("query", "key", "value")),
    ("layers.{i}.attention.output.weight", "model.layers.{i}.self_attn.o_proj.weight"), *common.JOINED_FFN,
)  # fmt: skip


def _differs(model: Model) -> str | None:
    if model.rope.scaling not in ("none", "ntk"):
        return f"its RoPE is scaled (rope.scaling {model.rope.scaling})"
    return heads_are_the_width(model)


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    return {
        "sliding_window": int(model.sliding_window) if model.sliding_window else None, "resid_pdrop": model.residual_dropout,
        "original_max_position_embeddings": int(model.max_position_embeddings or 2048),
    }  # fmt: skip


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    return {"residual_dropout": config["resid_pdrop"]} | common.window_of_all_layers(config)


def _gguf(model: Model) -> Gguf:
    return common.gguf(model, "phi3", metadata={"sliding_window": 0})  # which is how llama.cpp tells Phi-4 from older ones


FAMILY = Family(
    name="Phi3ForCausalLM", model_type="phi3", about="dense, plain, in joined matrices (Phi-3, Phi-4); heads x head_dim is the width; "
    "without LongRoPE",
    names=_NAMES,
    defaults=common.DEFAULTS | {
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_key_value_heads": Null(int), "head_dim": Extra(int),
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": Null(int), "resid_pdrop": 0.0,
    },
    rope_types=("default",), fixed={"attention_bias": (False,), "embd_pdrop": (0.0,)},
    allows=frozenset({"partial RoPE", "sliding window"}), differs=_differs,
    to_config=_to_config, omits=("attention_bias", "head_dim"), from_config=_from_config,
    architectures=("phi3",), gguf=_gguf, without_gguf="sliding window",
)  # fmt: skip
