"""Finding the tokens of a document, and the document of a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lmworks.errors import UserError
from lmworks.progress import bar
from lmworks.shards.format.indexed import with_ending
from lmworks.shards.format.lineage import ENDING, DocumentSpan, Lineage, open_lineage
from lmworks.shards.format.manifest import Manifest, SplitName
from lmworks.shards.storage.shard_files import ShardFiles


@dataclass(frozen=True)
class DocumentLocation:
    """A document in the shards: its number in the file `shard`, and its tokens [start, stop) in the whole of its source."""

    shard: str
    document: int
    source: str
    split: SplitName
    start: int
    stop: int


def find_document(shards_dir: Path, identity: str, source: str, split: SplitName) -> DocumentLocation | None:
    """The location of the document with id `identity` in `source`; None if it is not in the shards. Reads ids, not tokens."""
    manifest = Manifest.load(shards_dir)
    if all(one.name != source for one in manifest.sources):
        return None
    stream = manifest.stream(shards_dir, source, split, ShardFiles(shards_dir, manifest))
    with bar("find in shards", len(stream.prefixes)) as progress:
        for number, prefix in enumerate(stream.prefixes):
            document = _row_of(prefix, identity)
            if document is not None:
                begin, end = (stream.offsets[number] + stream.file(number).document_start(np.array([document, document + 1]))).tolist()
                return DocumentLocation(prefix.name, document, source, split, begin, end)
            progress.advance()
    return None


def _row_of(prefix: Path, identity: str) -> int | None:
    first = 0
    for ids in _ids(prefix):
        place: int = pc.index(ids, identity).as_py()
        if place >= 0:
            return first + place
        first += len(ids)
    return None


def _ids(prefix: Path) -> Iterator[pa.ChunkedArray]:
    with open_lineage(with_ending(prefix, ENDING)) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=["id"])["id"]


def document_at(shards_dir: Path, source: str, token: int) -> DocumentSpan:
    """The document that holds a token of a source's training text, with the token's place in it. UserError where there is no such token."""
    manifest = Manifest.load(shards_dir)
    stream = manifest.stream(shards_dir, source, open_file=ShardFiles(shards_dir, manifest))
    if not 0 <= token < len(stream):
        raise UserError(f"source {source} has {len(stream):,} tokens to train on, from 0 on; there is no token {token:,}")
    number, document, start, stop = next(stream.spans(token, token + 1))
    return Lineage(stream.prefixes[number]).span(document, start, stop)
