"""Mistral: a sliding window in all layers. Without one it equals Llama and is exported as Llama."""

from __future__ import annotations

from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Family, Gguf, NoClass
from lmworks.recipe.schema.model import Model, Rope


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    assert model.sliding_window
    return {"sliding_window": int(model.sliding_window)}


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    return common.window_of_all_layers({"sliding_window": 4096} | config)  # the default of the class


def _gguf(_: Model) -> Gguf:
    raise NoClass("it has a sliding window, and llama.cpp runs Mistral as llama, which ignores it")


FAMILY = Family(
    name="MistralForCausalLM", model_type="mistral", about="dense, plain, a sliding window in all layers", names=common.LLAMA,
    requires=frozenset({"sliding window"}),
    to_config=_to_config, omits=("attention_bias",), from_config=_from_config, gguf=_gguf, without_gguf="all",
)  # fmt: skip
