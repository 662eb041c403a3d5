"""The batch of each step of a run, read from the shards. It depends on the step alone; no state is kept between calls (promise 1).

Reads the next batches in a thread while the step computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import numpy as np

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.timeline import Growth
from lmworks.shards.batch import Batch, one_hot
from lmworks.shards.lineage import DocumentSpan, Lineage, SequenceDocuments
from lmworks.shards.manifest import Manifest
from lmworks.shards.order import LocatedSequences, Order, OrderChange
from lmworks.shards.remote import ReadAhead, RemoteShards, ShardFiles, Storage
from lmworks.shards.row_plans import RowPlans, Waste, waste
from lmworks.shards.sequences import BestFit, Concatenated, Filled, Sequences
from lmworks.shards.validation import Validation


class Batches:
    """All batches of a run, by number, and the held-out ones by domain."""

    def __init__(
        self, recipe: Recipe, shards_dir: Path, changes: Sequence[OrderChange] = (), storage: Storage | None = None,
        growths: Sequence[Growth] = (),
    ) -> None:  # fmt: skip
        self.shards_dir, self.recipe = Path(shards_dir), recipe
        self.manifest = Manifest.load(self.shards_dir)
        remote = RemoteShards(recipe.shards.cache, self.shards_dir, storage) if recipe.shards.cache else None
        self._files = ShardFiles(self.shards_dir, self.manifest, remote)
        self._streams = {
            source.name: self.manifest.stream(self.shards_dir, source.name, open_file=self._files) for source in self.manifest.sources
        }
        self.sources = tuple(source.name for source in self.manifest.sources)
        """The columns of `Batch.sources`: all sources that a mixture may name, also one that is changed during the run."""
        self._source_numbers = {name: number for number, name in enumerate(self.sources)}
        self._plans: RowPlans | None = None
        if recipe.shards.packing == "best_fit":
            self._plans = RowPlans(self.shards_dir, self.manifest, self._streams, recipe.threads or 1)
        self._lineage: dict[Path, Lineage] = {}
        self.growths = tuple(growths)
        self.set_changes(changes)
        ahead = int(recipe.shards.cache.prefetch.value) if recipe.shards.cache else 0
        self._ahead = ReadAhead(self.fill_cache, ahead, self.steps - 1) if ahead else None

    def set_changes(self, changes: Sequence[OrderChange]) -> None:
        """Use these changes of the order (the complete list) for all later calls.

        Safe while another thread is reading a batch: that batch uses either the old or the new ones.
        """
        order = self.order_with(changes)
        self.changes = tuple(changes)
        self._sequences: Sequences = BestFit(order, self._streams, self._plans) if self._plans else Concatenated(order, self._streams)

    def set_growths(self, growths: Sequence[Growth]) -> None:
        """Follow these growths of the batch (the complete list) in all later calls; safe as `set_changes` is."""
        if tuple(growths) != self.growths:
            self.growths = tuple(growths)
            self.set_changes(self.changes)

    def order_with(self, changes: Sequence[OrderChange]) -> Order:
        """The order with these changes. Raises `UserError` for an impossible one."""
        return Order(self.recipe, self.manifest, changes, self._plans.count_rows if self._plans else None, self.growths)

    @property
    def order(self) -> Order:
        return self._sequences.order

    @property
    def steps(self) -> int:
        return self.order.steps

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """The batch of a step, or its sequences [start, stop): equal to `batch(step).rows(start, stop)`, but only these are read."""
        sequences = self._sequences
        order = sequences.order
        first, count = order.sequences(step)
        stop = count if stop is None else stop
        assert 0 <= start <= stop <= count, "sequences of this step"
        phase = order.phase_of(step)
        found = order.locate(phase, np.arange(first + start, first + stop))
        if self._ahead:
            self._ahead.follow(step)
        self._fill_cache(sequences, phase, found)
        filled = sequences.fill(phase, found)
        self._check_vocabulary(filled, step)
        rows = np.arange(0, filled.tokens.size, filled.tokens.shape[1])
        begins = np.append(filled.begins if self.recipe.train.phases[phase].mask_documents else rows, filled.tokens.size).astype(np.int32)
        sources = one_hot([self._source_numbers[order.sources[one]] for one in found.source.tolist()], len(self.sources))
        return Batch(filled.tokens, filled.labels, begins, phase, step, sources=sources)

    def fill_cache(self, step: int) -> None:
        """Read everything that the batch of a step needs into the cache (`shards.cache`); nothing for a step behind the last."""
        sequences = self._sequences
        if step >= sequences.order.steps:  # the batch has grown since then, and the run has fewer steps
            return
        first, count = sequences.order.sequences(step)
        phase = sequences.order.phase_of(step)
        self._fill_cache(sequences, phase, sequences.order.locate(phase, np.arange(first, first + count)))

    def _fill_cache(self, sequences: Sequences, phase: int, found: LocatedSequences) -> None:
        if self._files.remote:
            ranges = sequences.ranges(phase, found)
            self._files.remote.fill_cache((self._files(prefix), start, stop) for prefix, start, stop in ranges)

    def documents(self, step: int) -> list[SequenceDocuments]:
        """The documents of each sequence of a step, with the rows of the raw files that they come from."""
        first, count = self.order.sequences(step)
        phase = self.order.phase_of(step)
        found = self.order.locate(phase, np.arange(first, first + count))
        rows = []
        for row in range(count):
            index, sequence = int(found.source[row]), int(found.sequence[row])
            source = self.order.sources[index]
            ranges = self._sequences.token_ranges(phase, index, sequence)
            spans = [span for start, stop in ranges for span in self._spans(source, start, stop)]
            rows.append(SequenceDocuments(first + row, source, int(found.epoch[row]), sequence, spans))
        return rows

    def shared_documents(self) -> list[tuple[str, str, DocumentSpan]]:
        """Documents that a border between two phases splits: (phase before, phase after, document)."""
        cut: list[tuple[str, str, DocumentSpan]] = []
        if self._plans:
            return cut  # a whole document belongs to the phase in whose range it begins
        for source in self.order.sources:
            shares = [share for share in self.order.shares() if share.source == source and share.stop > share.start]
            for before, after in pairwise(shares):
                (span,) = self._spans(source, after.start, after.start + 1)
                if span.start > 0:
                    cut.append((before.phase, after.phase, span))
        return cut

    def waste(self) -> dict[tuple[str, int], Waste]:
        """The cost of each packing by source and sequence length, measured on the first documents of each source."""
        wanted = {(share.source, self.order.length_of(share.phase)) for share in self.order.shares()}
        return {(source, length): waste(self._streams[source].file(0), length) for source, length in sorted(wanted)}

    def validation(self, domain: str, sequence_length: int, sequences: int, max_bytes: int | None = None) -> Validation:
        """The held-out documents of a domain, in batches of `sequences` sequences; see `Validation`."""
        return Validation(self.shards_dir, self.manifest, domain, sequence_length, sequences, max_bytes, self._files)

    def _spans(self, source: str, start: int, stop: int) -> list[DocumentSpan]:
        stream = self._streams[source]
        spans = []
        for file, document, first, past in stream.spans(start, stop):
            prefix = stream.prefixes[file]
            lineage = self._lineage.setdefault(prefix, Lineage(prefix))
            spans.append(lineage.span(document, first, past))
        return spans

    def _check_vocabulary(self, filled: Filled, step: int) -> None:
        if not filled.tokens.size:
            return
        least, most = int(filled.tokens.min()), max(int(filled.tokens.max()), int(filled.labels.max()))
        if most >= self.manifest.vocab_size or least < 0:
            raise UserError(
                f"step {step}: a token shard below {self.shards_dir} holds token {most if least >= 0 else least}, outside the vocabulary "
                f"of {self.manifest.vocab_size}; the file is damaged: delete the folder {self.shards_dir} and run the same command again"
            )


class Prefetch:
    """Yields `make(start)`, ..., `make(stop - 1)`; a thread stays up to `depth` batches ahead.

    It has no state to save: start it at any step. `waited` is how long the last `next` waited, in seconds
    (perf/data_wait), and an error while reading is raised by `next`; so is a `UserError` after `patience` seconds
    without one. Use it as a context manager, or `close` it.
    """

    def __init__(
        self, make: Callable[[int], Batch], start: int, stop: int, depth: int = 2, patience: float | None = None
    ) -> None:
        self.waited, self._patience = 0.0, patience
        self.ahead = depth + 2  # from the batch returned last to the first that is certainly not being read yet
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(make, start, stop), name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        item = self._get() if not self._closing.is_set() else None
        self.waited = time.perf_counter() - begin
        if isinstance(item, Batch):
            return item
        self._closing.set()
        if item is None:
            raise StopIteration
        raise item

    def _get(self) -> Batch | BaseException | None:
        try:
            return self._ready.get(timeout=self._patience)
        except queue.Empty:
            return UserError(
                f"no batch arrived for {self._patience:,.0f} s (stability.data_timeout): the storage of the shards does not answer; "
                "check that it can be read, then run the same command again"
            )

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and wait for it, at most `patience` seconds if it waits for storage that does not answer."""
        self._closing.set()
        last = None if self._patience is None else time.monotonic() + self._patience
        while self._thread.is_alive() and (last is None or time.monotonic() < last):
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _work(self, make: Callable[[int], Batch], start: int, stop: int) -> None:
        try:
            for step in range(start, stop):
                if not self._offer(make(step)):
                    return
            self._offer(None)
        except BaseException as error:  # passed to the thread that requests the batch
            self._offer(error)

    def _offer(self, item: Batch | BaseException | None) -> bool:
        while not self._closing.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
