"""Mistral: a sliding window in all layers. Without one it equals Llama and is exported as Llama."""

from __future__ import annotations

from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Family, Gguf, NoClass, Null
from lmworks.recipe.schema.model import Model, Rope


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    assert model.sliding_window
    return {"sliding_window": int(model.sliding_window)}


def _gguf(_: Model) -> Gguf:
    raise NoClass("it has a sliding window, and llama.cpp runs Mistral as llama, which ignores it")


FAMILY = Family(
    name="MistralForCausalLM", model_type="mistral", about="dense, plain, a sliding window in all layers", names=common.LLAMA,
    requires=frozenset({"sliding window"}),
    defaults=common.DEFAULTS | {
        "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": Null(int), "max_position_embeddings": 131072,
        "sliding_window": Null(int, 4096),
    },
    fixed={"attention_bias": (False,)},
    to_config=_to_config, omits=("attention_bias",), from_config=common.window_of_all_layers, gguf=_gguf, without_gguf="all",
)  # fmt: skip
