"""Formats in which a finished model is exported."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lmworks.recipe.schema.base import Node


class Export(Node):
    """Formats to write; each is loaded again and compared before it counts as done."""

    huggingface: bool = Field(True, description="safetensors, config and tokenizer for transformers, vLLM and SGLang")
    gguf: bool = Field(True, description="one file for llama.cpp")
    dtype: Literal["fp32", "bf16"] = Field("bf16", description="of the exported weights; the router's selection bias stays fp32")
