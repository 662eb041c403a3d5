"""Qwen2 and Qwen2.5: biases on query, key and value."""

from __future__ import annotations

from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Extra, Family, Gguf, Null
from lmworks.recipe.schema.model import Model


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    return common.window_from_config(config, common.upper_layers_slide(config))


def _gguf(model: Model) -> Gguf:
    assert model.num_attention_heads and model.head_dim
    if model.num_attention_heads * model.head_dim != model.hidden_size:
        return common.gguf(model, "llama", interleaved_rope=True)  # the same with biases, and with heads of any width
    return common.gguf(model, "qwen2")


FAMILY = Family(
    name="Qwen2ForCausalLM", model_type="qwen2", about="dense with biases", names=common.LLAMA,
    defaults=common.DEFAULTS | common.WINDOW | {
        "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": Null(int, 32), "head_dim": Extra(int),
        "max_position_embeddings": 32768,
    },
    ignored=("attention_bias",),
    requires=frozenset({"biases"}), allows=frozenset({"sliding window", "full-attention layers beside it"}),
    to_config=common.window_to_config, from_config=_from_config,
    architectures=("qwen2", "llama"), gguf=_gguf, without_gguf="sliding window",
)  # fmt: skip
