"""Tokenizer and shards: how clean text becomes token files."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lmworks.recipe.base import Node
from lmworks.recipe.units import Bytes, Tokens


class Tokenizer(Node):
    """Byte-level BPE with named special tokens and a chat template."""

    path: str | None = Field(None, description="an existing tokenizer.json (or its directory) to use instead of training one")
    vocab_size: int = Field(4096, ge=320, description="entries, special tokens included")
    reserved_tokens: int = Field(0, ge=0, description="unused special tokens kept for later")
    sample_bytes: Bytes = Field(Bytes.parse("16MB"), description="text used for training, drawn by mixture weight")


class Shards(Node):
    """Token files in Megatron's indexed format."""

    shard_tokens: Tokens = Field(Tokens.parse("1B"), description="tokens per .bin file")
    packing: Literal["concatenate"] = Field("concatenate", description="documents end to end, cut into sequences")
    max_epochs: float = Field(
        40.0,
        gt=0,
        description="most readings of a source in a phase; repeated text loses value after about 4, all of it by 40 (arXiv:2305.16264)",
    )
