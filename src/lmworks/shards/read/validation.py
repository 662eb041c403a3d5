"""Validation batches: held-out documents, with the bytes of text that they predict, for bits per byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lmworks.errors import UserError
from lmworks.shards.format.indexed import IndexedFile
from lmworks.shards.format.labels import IGNORE
from lmworks.shards.format.lineage import DocumentSpan, Lineage
from lmworks.shards.format.manifest import TOKEN_BYTES, Manifest
from lmworks.shards.format.token_stream import TokenStream
from lmworks.shards.packing.best_fit import PackedRows, Pieces
from lmworks.shards.read.batch import Batch


class Validation:
    """The held-out documents of a domain, each from its start to its end, in an order that never changes.

    A document longer than `sequence_length` is split into pieces; every token but the first of a document is predicted exactly
    once, the <|endoftext|> too (it costs bits and has no bytes). With `max_bytes`, each source of the domain gives documents
    up to its share by size; the last one may be cut. All batches have the shape (sequences, sequence_length): the last is filled with
    sequences without labels.
    """

    def __init__(
        self,
        shards_dir: Path,
        manifest: Manifest,
        domain: str,
        sequence_length: int,
        sequences: int,
        max_bytes: int | None = None,
        open_file: Callable[[Path], IndexedFile] | None = None,
    ) -> None:
        sources = [source for source in manifest.sources if source.domain == domain and source.validation]
        if not sources:
            raise UserError(f"no held-out text of domain {domain}; available: {', '.join(manifest.domains()) or 'none'}")
        self.domain, self._sequences, self._length = domain, sequences, sequence_length
        splits = [source.validation for source in sources if source.validation]
        shards = [shard for split in splits for shard in split.shards]
        self._stream = TokenStream([Path(shards_dir) / shard.prefix for shard in shards], [shard.tokens for shard in shards], open_file)
        self._token_bytes = load_token_bytes(shards_dir)
        total = max(1, sum(split.bytes for split in splits))
        self._documents: list[tuple[int, int, int]] = []  # shard, document, inputs
        first_shard, self.text_bytes = 0, 0
        for split in splits:
            share = None if max_bytes is None else max_bytes * split.bytes // total
            self.text_bytes += self._choose(range(first_shard, first_shard + len(split.shards)), share)
            first_shard += len(split.shards)
        self._packed = PackedRows(self._stream, self._pieces(), sequence_length)

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self._packed) // self._sequences)

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(number) for number in range(len(self)))

    def batch(self, number: int) -> Batch:
        """The number-th batch. Its `phase` is 0 and its `step` is `number`; both have no meaning here."""
        shape = (self._sequences, self._length)
        tokens, labels = np.empty(shape, np.int32), np.full(shape, IGNORE, np.int32)
        begins: list[int] = []
        for row in range(self._sequences):
            packed = number * self._sequences + row
            inside = self._packed.fill(packed, tokens[row], labels[row]) if packed < len(self._packed) else [0]
            begins += [row * self._length + at for at in inside]
        tokens[len(self._packed) - number * self._sequences :] = 0
        sequence_bytes = np.where(labels == IGNORE, 0, self._token_bytes[np.maximum(labels, 0)]).sum(axis=1, dtype=np.int64)
        return Batch(tokens, labels, np.array([*begins, tokens.size], np.int32), 0, number, sequence_bytes)

    def documents(self) -> list[DocumentSpan]:
        """The documents covered, with the tokens read of each."""
        lineages = [Lineage(prefix) for prefix in self._stream.prefixes]
        return [lineages[shard].span(document, 0, inputs + 1) for shard, document, inputs in self._documents]

    def _choose(self, shards: range, max_bytes: int | None) -> int:
        """Take documents of one source until its bytes are used up; returns the bytes that will be predicted."""
        taken = 0
        for shard in shards:
            file = self._stream.file(shard)
            for document in range(file.documents):
                counted = np.cumsum(self._token_bytes[file.document(document)[1:]], dtype=np.int64)
                inputs = len(counted)
                if max_bytes is not None and inputs and taken + int(counted[-1]) > max_bytes:
                    inputs = int(np.searchsorted(counted, max_bytes - taken, side="right"))
                if inputs:
                    self._documents.append((shard, document, inputs))
                    taken += int(counted[inputs - 1])
                if inputs < len(counted):
                    return taken
        return taken

    def _pieces(self) -> Pieces:
        starts, lengths = [], []
        for shard, document, inputs in self._documents:
            start = int(self._stream.offsets[shard] + self._stream.file(shard).document_start(np.array(document)))
            for at in range(0, inputs, self._length):
                starts.append(start + at)
                lengths.append(min(self._length, inputs - at))
        return Pieces(np.array(starts, np.int64), np.array(lengths, np.int64))


def load_token_bytes(shards_dir: Path) -> np.ndarray:
    """Bytes of text of each token, (vocab_size,) int32; special tokens have none."""
    path = Path(shards_dir) / TOKEN_BYTES
    try:
        table: np.ndarray = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        raise UserError(f"{path} is missing or broken; delete the folder {shards_dir} and run the same command again") from None
    return table
