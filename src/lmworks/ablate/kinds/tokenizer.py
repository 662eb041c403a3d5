"""Tokenizers: vocabulary sizes, kinds, and existing tokenizers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmworks.ablate.kinds.base import Ablation, Expansion, distinct
from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe


class Tokenizer(Ablation):
    """Tokenizers: one arm per vocabulary size, kind, or existing tokenizer. Only measures per byte are compared, on all held-out text."""

    kind: Literal["tokenizer"] = "tokenizer"
    vocab_sizes: list[int] = Field(default_factory=list, description="vocabulary sizes to train, an arm each")
    kinds: list[Literal["bytes", "sentencepiece"]] = Field(default_factory=list, description="kinds of tokenizer to train, an arm each")
    paths: dict[str, str] = Field(
        default_factory=dict, description="existing tokenizers by the name of their arm: a tokenizer.json or its folder"
    )

    default_measures: ClassVar = ("evaluation/bits_per_byte", "evaluation/{domain}/bits_per_byte")

    def expand(self, recipe: Recipe) -> Expansion:
        arms = [(f"vocab-{size}", f"tokenizer.vocab_size={size}") for size in self.vocab_sizes]
        arms += [(kind, f"tokenizer.kind={kind}") for kind in self.kinds]
        arms += [(name, f"tokenizer.path={path}") for name, path in self.paths.items()]
        if not arms:
            raise UserError("kind tokenizer needs something to compare: vocab_sizes, kinds or paths")
        own = [(name, [override, "model.vocab_size=null"]) for name, override in arms]
        return Expansion(distinct("vocab_sizes, kinds, paths", [("recipe", []), *own]), "recipe")
