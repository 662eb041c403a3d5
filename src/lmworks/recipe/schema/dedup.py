"""Which documents and passages are the same, and what may not be learnt: deduplication and decontamination."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import Node


class Minhash(Node):
    """Near-duplicate detection: MinHash sketches in LSH bands (Broder 1997), doubtful pairs compared exactly."""

    threshold: float = Field(0.8, gt=0, lt=1, description="Jaccard similarity of word n-grams from which two documents are the same")
    ngram: int = Field(5, gt=0, description="words (characters where a language has no spaces) per shingle")
    permutations: int = Field(256, ge=16, le=4096, description="values per sketch, a byte each")
    bands: int | None = Field(
        None, gt=0, description="documents meet if all values of one band agree; by default as few as find 99% of pairs at the threshold"
    )

    @model_validator(mode="after")
    def _divisible(self) -> Minhash:
        if self.bands is not None and self.bands > self.permutations:
            raise ValueError(f"dedup.minhash: {self.bands} bands need as many permutations, not {self.permutations}")
        return self


class Substring(Node):
    """Passages that stood earlier in the corpus, or in the same document, are cut out (Lee et al. 2022, arXiv:2107.06499)."""

    renamed: ClassVar = {"length": "min_length", "minimum": "min_remaining"}

    min_length: int = Field(50, ge=16, description="words in a row (characters where a language has no spaces) from which a passage is cut")
    min_remaining: float = Field(0.2, ge=0, le=1, description="a document of which less than this share is left goes whole")


class Semantic(Node):
    """Documents that say the same in other words, by the cosine of their embeddings (SemDeDup, arXiv:2303.09540)."""

    threshold: float = Field(0.95, gt=0, le=1, description="cosine from which two documents are the same")
    model: str | None = Field(None, description="folder of an embedding model, relative to the recipe; hashed words when left out")
    dimensions: int = Field(256, ge=64, le=4096, description="of an embedding by hashed words, two bytes each")
    per_cluster: int = Field(2000, gt=0, description="documents that are compared with each other; k-means puts like ones together")


class Dedup(Node):
    """Which documents are the same, within and across sources and phases. Of several the one of the highest priority is kept."""

    exact: bool = Field(True, description="drop documents whose normalised text was seen before")
    url: bool = Field(False, description="drop documents whose address was seen before, once scheme, tracking and the like are taken off")
    minhash: Minhash | None = Minhash()
    semantic: Semantic | None = None
    substring: Substring | None = None
    variants: bool = Field(
        False, description="also compare variants that a step made of a document with it and with each other; equal texts always go"
    )
    priority: tuple[str, ...] = Field((), description="sources whose copy is kept, best first; the others follow in their order")


class SourceDedup(Node):
    """What may be dropped of one source as a copy. Its documents are still what copies in other sources are compared with."""

    exact: bool = Field(True, description="documents whose normalised text was seen before")
    url: bool = Field(True, description="documents whose address was seen before")
    minhash: bool = Field(True, description="near-duplicates")
    semantic: bool = Field(True, description="documents that say the same in other words")
    substring: bool = Field(True, description="repeated passages")
    threshold: float | None = Field(None, gt=0, lt=1, description="replaces the threshold of dedup.minhash")


class Decontaminate(Node):
    """What to do about training documents that hold text of the held-out documents or of an evaluation set."""

    renamed: ClassVar = {"gate": "action"}

    ngram: int = Field(13, ge=5, description="words in an overlap that counts (twice as many characters where a language has no spaces)")
    action: Literal["drop", "fail", "report"] = Field("drop", description="drop them; stop at them; or name them and keep them")
