"""Formats in which a finished model is exported."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import read_by


class Export(Node):
    """Formats to write; each is loaded again and compared before it counts as done."""

    effect: ClassVar = read_by("export")

    huggingface: bool = Field(True, description="safetensors, config and tokenizer for transformers, vLLM and SGLang")
    gguf: bool | Literal["auto"] = Field(
        "auto", description="one file for llama.cpp; auto: if llama.cpp can express the model and its tokenizer"
    )
    dtype: Literal["fp32", "bf16"] = Field("bf16", description="type of the exported weights; the router's selection bias stays fp32")
