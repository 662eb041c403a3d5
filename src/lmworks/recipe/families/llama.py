"""Llama 1 to 3, and what is computed alike."""

from __future__ import annotations

from functools import partial

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Family, Null

FAMILY = Family(
    name="LlamaForCausalLM", model_type="llama", about="dense, plain", names=common.LLAMA,
    defaults=common.DEFAULTS | {
        "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": Null(int), "head_dim": Null(int),
        "max_position_embeddings": 2048, "attention_bias": False, "attention_dropout": Null(float, 0.0), "mlp_bias": False,
    },
    architectures=("llama",), gguf=partial(common.gguf, architecture="llama", interleaved_rope=True),
)  # fmt: skip
