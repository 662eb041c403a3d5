"""The manifest of a shards folder. It is written last: if it exists, all files that it names do."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from lmworks.errors import UserError
from lmworks.io.files import read_json, sha256_file, write_json
from lmworks.shards.indexed import IndexedFile, with_ending
from lmworks.shards.token_stream import TokenStream
from lmworks.ui.terminal import bar

SplitName = Literal["train", "validation"]
MANIFEST = "manifest.json"
TOKEN_BYTES = "token_bytes.npy"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# Fields that become paths are validated here, since a manifest may come from an untrusted source.
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Ending = Annotated[str, Field(pattern=r"^(\.[a-z]+)+$")]
Count = Annotated[int, Field(ge=0, le=1 << 60)]
SOURCE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


class Shard(_Record):
    """One `.bin` with its `.idx` and lineage; `sha256` and `size` by file name extension.

    `prefix` is relative to the shards folder; that of an imported shard is absolute.
    """

    prefix: str
    tokens: Count
    documents: Count
    sha256: dict[Ending, Sha256]
    size: dict[Ending, Count]

    @field_validator("sha256")
    @classmethod
    def _hashed(cls, sha256: dict[str, str]) -> dict[str, str]:
        if not {".bin", ".idx"} <= set(sha256):
            raise ValueError("the hash of .bin or .idx is missing")
        return sha256

    @field_validator("prefix")
    @classmethod
    def _inside(cls, prefix: str) -> str:
        if ".." in PurePosixPath(prefix).parts or not re.search(rf"(^|/)(train|validation)/{SOURCE_NAME}$", prefix):
            raise ValueError(f"{prefix!r} is not a prefix of token files")
        return prefix


class Split(_Record):
    """The documents of one source that are trained on, or held out. `inputs` is the hash of everything that they were made from."""

    tokens: Count
    bytes: Count
    documents: Count
    inputs: str
    shards: tuple[Shard, ...]


class SourceShards(_Record):
    """One source of the corpus."""

    name: str
    domain: str
    train: Split
    validation: Split | None = None


class Manifest(_Record):
    """All sources, and the tokenizer that made them."""

    format: Literal[1] = 1
    seed: int
    vocab_size: int
    dtype: str
    tokenizer_sha256: Sha256
    token_bytes_sha256: Sha256
    sources: tuple[SourceShards, ...]

    @classmethod
    def load(cls, shards_dir: Path, name: str = MANIFEST) -> Manifest:
        """Read the manifest; a UserError if it is missing or not ours."""
        path = Path(shards_dir) / name
        if not path.exists():
            raise UserError(f"{path} does not exist; make the shards first with: lmworks run RECIPE")
        try:
            return cls.model_validate(read_json(path))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{path}: {where}: {first['msg']}; delete the folder {path.parent} and run the same command again") from None

    @cached_property
    def _by_name(self) -> dict[str, SourceShards]:
        return {source.name: source for source in self.sources}

    def save(self, path: Path) -> None:
        write_json(path, self.model_dump())

    def fingerprint(self) -> str:
        """Hex SHA-256 of the token files' own hashes and the tokenizer's."""
        files = {source.name: [[shard.sha256[".bin"], shard.sha256[".idx"]] for shard in source.train.shards] for source in self.sources}
        return hashlib.sha256(json.dumps([self.tokenizer_sha256, files], sort_keys=True).encode()).hexdigest()

    def digests(self) -> dict[str, str]:
        """A short hash of token files and tokenizer, by source. It tells whether a run still reads the data that it began with."""
        return {source.name: self.model_copy(update={"sources": (source,)}).fingerprint()[:16] for source in self.sources}

    def source(self, name: str) -> SourceShards:
        if name in self._by_name:
            return self._by_name[name]
        raise UserError(f"source {name} has no shards; there are: {', '.join(source.name for source in self.sources)}")

    def train_tokens(self) -> dict[str, int]:
        """Tokens to train on, by source."""
        return {source.name: source.train.tokens for source in self.sources}

    def domains(self) -> list[str]:
        """Domains with held-out text, sorted."""
        return sorted({source.domain for source in self.sources if source.validation})

    def shards(self) -> Iterator[Shard]:
        """All shards, of both splits."""
        for source in self.sources:
            for split in (source.train, source.validation):
                yield from split.shards if split else ()

    def stream(
        self, shards_dir: Path, source: str, split: SplitName = "train", open_file: Callable[[Path], IndexedFile] | None = None
    ) -> TokenStream:
        """The tokens of a source; files are opened when read."""
        part: Split | None = getattr(self.source(source), split)
        shards = part.shards if part else ()
        return TokenStream([Path(shards_dir) / shard.prefix for shard in shards], [shard.tokens for shard in shards], open_file)


def check_vocabulary(manifest: Manifest, vocab_size: int, tokenizer_sha256: str | None = None) -> None:
    """Raise UserError unless shards and model (and tokenizer, where its hash is given) have the same vocabulary.

    The embedding may have more rows than the tokenizer has entries (padding to a round number), never fewer.
    """
    again = "delete the shards folder to have it made again, or go back to the tokenizer they were made with"
    if vocab_size < manifest.vocab_size:
        raise UserError(f"the model's vocab_size {vocab_size:,} is smaller than the shards' {manifest.vocab_size:,} entries; {again}")
    if tokenizer_sha256 is not None and tokenizer_sha256 != manifest.tokenizer_sha256:
        raise UserError(
            f"the shards were made with another tokenizer ({manifest.tokenizer_sha256[:12]}, now {tokenizer_sha256[:12]}); {again}"
        )


def verify(shards_dir: Path, manifest: Manifest | None = None) -> None:
    """Read every file and compare it with its hash; a UserError names the first that differs."""
    manifest = manifest or Manifest.load(shards_dir)
    _require_hash(Path(shards_dir) / TOKEN_BYTES, manifest.token_bytes_sha256)
    shards = list(manifest.shards())
    with bar("verify shards", sum(sum(shard.size.values()) for shard in shards)) as progress:
        for shard in shards:
            for ending, digest in shard.sha256.items():
                _require_hash(with_ending(Path(shards_dir) / shard.prefix, ending), digest)
                progress.advance(shard.size[ending])


def _require_hash(path: Path, digest: str) -> None:
    again = f"delete the folder {path.parent} and run the same command again to have it made anew"
    if not path.exists():
        raise UserError(f"{path} is missing; {again}")
    if sha256_file(path) != digest:
        raise UserError(f"{path} is damaged (its hash differs); {again}")
