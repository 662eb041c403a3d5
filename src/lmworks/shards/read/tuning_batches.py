"""Batches of packed whole conversations for fine-tuning, with loss only where the mask is 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from lmworks.errors import UserError
from lmworks.recipe.derivation.passes import rows_read, steps_of
from lmworks.shards.format.indexed import IndexedFile
from lmworks.shards.format.labels import IGNORE
from lmworks.shards.order.mixture import Mixture
from lmworks.shards.order.permute import derive_key, permute
from lmworks.shards.packing.best_fit import PADDING, PackedRows, Pieces
from lmworks.shards.read.batch import Batch


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
        for row, found in enumerate(self._mixed(places) if self._epochs is None else self._each_once(places)):
            if found is None:
                tokens[row], labels[row] = PADDING, IGNORE
                begins.append(row * self._length)
            else:
                packed, where = found
                begins += [row * self._length + at for at in packed.fill(where, tokens[row], labels[row])]
        return Batch(tokens, labels, np.array([*begins, tokens.size], np.int32), 0, step)

    def _mixed(self, places: np.ndarray) -> Iterator[tuple[PackedRows, int]]:
        """The dataset and the row at each place, by the weights of the mixture."""
        turn, taken = self._mixture.locate(places)
        for source, k in zip(turn.tolist(), taken.tolist(), strict=True):
            name = self._mixture.names[source]
            packed = self._packed[name]
            epoch, position = divmod(k, len(packed))
            key = derive_key(self._seed, "tune", name, epoch)
            yield packed, int(permute(np.array([position]), len(packed), key)[0])

    def _each_once(self, places: np.ndarray) -> Iterator[tuple[PackedRows, int] | None]:
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
            yield self._packed[self._mixture.names[source]], at - int(self._ends[source - 1] if source else 0)
