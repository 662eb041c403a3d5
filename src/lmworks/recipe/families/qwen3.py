"""Qwen3, dense: QK norm."""

from __future__ import annotations

from functools import partial
from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Family, Null


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    return common.window_from_config(config, common.upper_layers_slide(config))


FAMILY = Family(
    name="Qwen3ForCausalLM", model_type="qwen3", about="dense with QK norm", names=(*common.LLAMA, *common.QK_NORMS),
    defaults=common.DEFAULTS | common.WINDOW | {
        "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": Null(int, 32), "head_dim": 128,
        "max_position_embeddings": 32768, "attention_bias": False,
    },
    requires=frozenset({"QK norm"}), allows=frozenset({"sliding window", "full-attention layers beside it"}),
    to_config=common.window_to_config, from_config=_from_config,
    architectures=("qwen3",), gguf=partial(common.gguf, architecture="qwen3"), without_gguf="sliding window",
)  # fmt: skip
