"""Token files, and their cache on a local disk."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import NO_EFFECT, read_by
from lmworks.recipe.schema.units import Bytes, Duration, Tokens


class Cache(Node):
    """A cache of token blocks on a fast local disk, for shards on slow or remote storage; the processes of a machine share it."""

    renamed: ClassVar = {"bytes": "max_bytes", "ahead": "prefetch"}

    dir: str = Field(description="a folder on the local disk")
    max_bytes: Bytes = Field(description="maximum size of the cached token blocks; document indexes take another 20 bytes per document")
    remote: str | None = Field(
        None,
        description="folder or fsspec URL with a copy of the run's shards folder; without it, that folder itself is cached",
    )
    prefetch: Duration = Field(Duration.parse("64 steps"), description="number of steps whose blocks are fetched in advance")

    @model_validator(mode="after")
    def _in_steps(self) -> Cache:
        if self.prefetch.unit != "steps":
            raise ValueError(f"shards.cache.prefetch {self.prefetch.text()!r} must be a number of steps, such as '64 steps'")
        return self


class Shards(Node):
    """Token files in Megatron's indexed format."""

    effect: ClassVar = read_by("shards")

    shard_tokens: Tokens = Field(Tokens.parse("1B"), description="tokens per .bin file")
    imported: Annotated[dict[str, str], read_by("shards", "pretrain")] = Field(
        default_factory=dict,
        description="additional sources by name: folders written by `lmworks data import`, relative to the working directory; mixtures "
        "may use them; they are searched for evaluation items and held-out text (corpus.decontaminate), and are not deduplicated",
    )
    cache: Annotated[Cache | None, NO_EFFECT] = None
    packing: Annotated[Literal["concatenate", "best_fit"], read_by("pretrain")] = Field(
        "concatenate",
        description="concatenate: documents are joined, then cut; best_fit: documents that fit stay whole, padded (arXiv:2404.10830)",
    )
    max_epochs: Annotated[float, NO_EFFECT] = Field(
        40.0,
        gt=0,
        description="maximum epochs over a source in a phase; repeated text loses value after about 4 epochs, all by 40 (arXiv:2305.16264)",
    )
    warn_epochs: Annotated[float, NO_EFFECT] = Field(
        4.0, gt=0, description="epochs over a source, in a phase or in all phases, above which a warning is printed"
    )
