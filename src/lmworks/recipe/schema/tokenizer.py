"""The tokenizer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import read_by
from lmworks.recipe.schema.units import Bytes


class Tokenizer(Node):
    """The tokenizer: byte-pair encoding over bytes or characters, special tokens, and a chat template."""

    effect: ClassVar = read_by("tokenizer", frozen=True)

    path: str | None = Field(
        None, description="an existing tokenizer.json (or its directory) to use instead of training one; relative to the working directory"
    )
    keep: bool = Field(
        False,
        description="take the tokenizer at `path` as it is: its ids, special tokens and chat template. Otherwise it gets the special "
        "tokens of GLM-4 that it lacks, and the template of chat_template. With start_from it is kept unless chat_template is set",
    )
    add_tokens: list[str] = Field(
        default_factory=list,
        description="texts that become tokens of the kept tokenizer, such as words of a field. Rows are added to the weights of start_from "
        "where none are free; the rows of new tokens begin as the mean of the others (Hewitt 2021)",
    )
    vocab_size: int = Field(4096, ge=320, description="number of entries, including special tokens")
    kind: Literal["bytes", "sentencepiece"] = Field(
        "bytes",
        description="bytes: byte-level BPE as in GLM-4.x. sentencepiece: characters with byte fallback and single digits; slower to encode",
    )
    special_tokens: int = Field(
        64, ge=36, description="number of special tokens: GLM-4.x's 36, then 28 for roles, tools and code, then reserved ones"
    )
    sample_bytes: Bytes = Field(
        Bytes.parse("16MB"), description="amount of text that the tokenizer is trained on, sampled by mixture weight"
    )
    language_balance: float = Field(
        0.7,
        ge=0,
        le=1,
        description="exponent on the share of each language: 1 keeps the mixture, 0 weights all languages equally; code keeps its share",
    )
    max_words: int = Field(
        2_000_000, ge=10_000, description="distinct words counted in training; the rarest are dropped first; about 0.5 kB of memory each"
    )
    chat_template: Annotated[Literal["brief", "glm-4.6"], read_by("tokenizer")] = Field(
        "brief", description="glm-4.6: as published, each answer starts with its reasoning. brief: the same without empty reasoning"
    )

    @field_validator("add_tokens")
    @classmethod
    def _distinct(cls, texts: list[str]) -> list[str]:
        for number, text in enumerate(texts):
            if not text or text in texts[:number]:
                raise ValueError(f"{text!r} {'is there twice' if text else 'is empty'}; remove it")
        return texts
