"""Deduplication and decontamination."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import Node


class Minhash(Node):
    """Near-duplicate detection: MinHash sketches in LSH bands (Broder 1997), uncertain pairs compared exactly."""

    threshold: float = Field(0.8, gt=0, lt=1, description="Jaccard similarity of word n-grams from which two documents are duplicates")
    ngram: int = Field(5, gt=0, description="words (characters where a language has no spaces) per shingle")
    permutations: int = Field(256, ge=16, le=4096, description="values per sketch, a byte each")
    bands: int | None = Field(
        None,
        gt=0,
        description="documents with one equal band are candidates; by default the fewest bands that find 99% of pairs at the threshold",
    )

    @model_validator(mode="after")
    def _divisible(self) -> Minhash:
        if self.bands is not None and self.bands > self.permutations:
            raise ValueError(f"dedup.minhash: {self.bands} bands need as many permutations, not {self.permutations}")
        return self


class Substring(Node):
    """Removal of passages that occur earlier in the corpus or in the same document (Lee et al. 2022, arXiv:2107.06499)."""

    renamed: ClassVar = {"length": "min_length", "minimum": "min_remaining"}

    min_length: int = Field(50, ge=16, description="minimum length of a passage in words (characters where a language has no spaces)")
    min_remaining: float = Field(0.2, ge=0, le=1, description="a document of which less than this fraction remains is dropped")


class Semantic(Node):
    """Semantic deduplication by the cosine similarity of document embeddings (SemDeDup, arXiv:2303.09540). Not for code and mathematics."""

    threshold: float = Field(0.95, gt=0, le=1, description="cosine similarity from which two documents are duplicates")
    model: str | None = Field(None, description="folder of an embedding model, relative to the recipe; hashed words when omitted")
    dimensions: int = Field(256, ge=64, le=4096, description="dimensions of an embedding of hashed words, two bytes each")
    per_cluster: int = Field(2000, gt=0, description="documents per k-means cluster; documents are compared within their cluster")


class Dedup(Node):
    """Deduplication within and across sources. Of several duplicates the one of the highest priority is kept."""

    exact: bool = Field(True, description="drop documents whose normalized text was seen before")
    url: bool = Field(False, description="drop documents whose URL was seen before, after scheme and tracking parameters are removed")
    minhash: Minhash | None = Minhash()
    semantic: Semantic | None = None
    substring: Substring | None = None
    variants: bool = Field(
        False,
        description="also compare the variants that a step made of a document with it and with each other; equal texts are always dropped",
    )
    priority: tuple[str, ...] = Field(
        (), description="sources whose copy is kept, highest priority first; the others follow in recipe order"
    )


class SourceDedup(Node):
    """The kinds of deduplication that apply to one source. Other sources are still compared with its documents."""

    exact: bool = Field(True, description="documents whose normalized text was seen before")
    url: bool = Field(True, description="documents whose URL was seen before")
    minhash: bool = Field(True, description="near-duplicates")
    semantic: bool = Field(True, description="semantic duplicates")
    substring: bool = Field(True, description="repeated passages")
    threshold: float | None = Field(None, gt=0, lt=1, description="overrides the threshold of dedup.minhash")


class Decontaminate(Node):
    """Decontamination: training documents that overlap with held-out documents or an evaluation set."""

    renamed: ClassVar = {"gate": "action"}

    ngram: int = Field(13, ge=5, description="length of an overlap in words (twice as many characters where a language has no spaces)")
    action: Literal["drop", "fail", "report"] = Field(
        "drop",
        description="drop: remove such documents, also rows of tuning data, preference pairs and prompts; fail: stop with an error; "
        "report: report and keep them",
    )
