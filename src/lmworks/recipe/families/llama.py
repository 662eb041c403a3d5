"""Llama 1 to 3, and what is computed alike."""

from __future__ import annotations

from functools import partial

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Family

FAMILY = Family(
    name="LlamaForCausalLM", model_type="llama", about="dense, plain", names=common.LLAMA,
    architectures=("llama",), gguf=partial(common.gguf, architecture="llama", interleaved_rope=True),
)  # fmt: skip
