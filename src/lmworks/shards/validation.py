"""Validation batches: held-out documents, with the bytes of text that they predict, for bits per byte.

Batches of packed whole conversations for fine-tuning, with loss only where the mask is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from lmworks.errors import UserError
from lmworks.recipe.timeline import rows_read, steps_of
from lmworks.shards.batch import IGNORE, Batch, one_hot
from lmworks.shards.epochs import derive_key, permute
from lmworks.shards.indexed import IndexedFile
from lmworks.shards.lineage import DocumentSpan, Lineage
from lmworks.shards.manifest import TOKEN_BYTES, Manifest
from lmworks.shards.mixture import Mixture
from lmworks.shards.row_plans import PADDING, PackedRows, Pieces
from lmworks.shards.token_stream import TokenStream


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


def check_batch(tokens: int | None, batch: int, sequence_length: int) -> None:
    """Raise `UserError` if a batch holds no sequence, or the budget (None with epochs) no batch."""
    if batch < sequence_length or (tokens is not None and tokens < batch):
        raise UserError(
            f"tune: tokens {tokens or 0:,}, batch {batch:,} and sequence_length {sequence_length:,} leave no whole step; "
            "batch must hold a sequence and tokens a batch"
        )


class TuningBatches:
    """Batches of `batch` tokens from datasets of conversations, up to a budget of `tokens`, or for so many `epochs`.

    `prefixes` maps each dataset to its shard (with a `.mask`), `weights` to its weight in the mixture (default: equal). Within a dataset,
    whole conversations are packed by best fit, and its rows come in a new keyed order every epoch. A conversation that does not
    fit into `sequence_length` is left out and counted in `dropped`. With `epochs`, the rows of all datasets come in one order, each once
    per epoch, whatever the weights; the last batch may end with blank rows. Like the pretraining batches, a pure function of the step.
    """

    def __init__(
        self,
        prefixes: Mapping[str, Path],
        sequence_length: int,
        batch: int,
        tokens: int | None,
        seed: int,
        weights: Mapping[str, float] | None = None,
        epochs: int | None = None,
    ) -> None:
        assert (tokens is None) != (epochs is None), "a budget or epochs"
        self._length, self._rows, self._seed, self._epochs = sequence_length, batch // sequence_length, seed, epochs
        check_batch(tokens, batch, sequence_length)
        self._mixture = Mixture(weights or dict.fromkeys(prefixes, 1.0))
        self.dropped: dict[str, int] = {}
        self._packed: dict[str, PackedRows] = {}
        kept_tokens = 0
        for name in self._mixture.names:
            file = IndexedFile(prefixes[name])
            if file.mask is None:
                again = f"delete the folder {file.prefix.parent} and run the same command again"
                raise UserError(f"tuning shard {file.prefix} has no .mask; {again}")
            starts = file.document_start(np.arange(file.documents + 1))
            inputs = np.diff(starts) - 1
            kept = (inputs >= 1) & (inputs <= sequence_length)
            self.dropped[name] = int(np.count_nonzero(~kept))
            if not kept.any():
                raise UserError(f"tune: no conversation of {name} fits into sequence_length {sequence_length:,}; raise it")
            self._packed[name] = PackedRows(file, Pieces(starts[:-1][kept], inputs[kept]), sequence_length)
            kept_tokens += int(inputs[kept].sum())
        self._ends = np.cumsum([len(self._packed[name]) for name in self._mixture.names])  # of the rows of all datasets
        self.filled = kept_tokens / (sequence_length * int(self._ends[-1]))
        self.steps = tokens // batch if tokens is not None else steps_of(int(self._ends[-1]), self._rows, epochs or 0)

    @property
    def epochs(self) -> dict[str, float]:
        """How many times each dataset is read."""
        if self._epochs is not None:
            return dict.fromkeys(self._mixture.names, float(self._epochs))
        counts = self._mixture.counts(self.steps * self._rows).tolist()
        return {name: count / len(self._packed[name]) for name, count in zip(self._mixture.names, counts, strict=True)}

    def batch(self, step: int) -> Batch:
        """The batch of a step; `phase` is 0."""
        if not 0 <= step < self.steps:
            raise UserError(f"tuning step {step} does not exist: there are {self.steps:,} steps, numbered from 0")
        shape = (self._rows, self._length)
        tokens, labels = np.empty(shape, np.int32), np.empty(shape, np.int32)
        places = np.arange(step * self._rows, (step + 1) * self._rows)
        begins: list[int] = []
        sources = [-1] * self._rows
        for row, found in enumerate(self._mixed(places) if self._epochs is None else self._each_once(places)):
            if found is None:
                tokens[row], labels[row] = PADDING, IGNORE
                begins.append(row * self._length)
            else:
                sources[row], where = found
                packed = self._packed[self.sources[sources[row]]]
                begins += [row * self._length + at for at in packed.fill(where, tokens[row], labels[row])]
        known = one_hot(sources, len(self.sources))
        return Batch(tokens, labels, np.array([*begins, tokens.size], np.int32), 0, step, sources=known)

    @property
    def sources(self) -> tuple[str, ...]:
        """The datasets, which are the columns of `Batch.sources`."""
        return tuple(self._mixture.names)

    def _mixed(self, places: np.ndarray) -> Iterator[tuple[int, int]]:
        """The number of the dataset and the row at each place, by the weights of the mixture."""
        turn, taken = self._mixture.locate(places)
        for source, k in zip(turn.tolist(), taken.tolist(), strict=True):
            name = self._mixture.names[source]
            packed = self._packed[name]
            epoch, position = divmod(k, len(packed))
            key = derive_key(self._seed, "tune", name, epoch)
            yield source, int(permute(np.array([position]), len(packed), key)[0])

    def _each_once(self, places: np.ndarray) -> Iterator[tuple[int, int] | None]:
        """The same, each row of all datasets once per epoch; None past the last epoch."""
        rows = int(self._ends[-1])
        read = rows_read(rows, self._epochs or 0)
        for place in places.tolist():
            if place >= read:
                yield None
                continue
            epoch, position = divmod(place, rows)
            at = int(permute(np.array([position]), rows, derive_key(self._seed, "tune", "epoch", epoch))[0])
            source = int(np.searchsorted(self._ends, at, side="right"))
            yield source, at - int(self._ends[source - 1] if source else 0)
