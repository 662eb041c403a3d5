"""Reading sequences, for each packing: a contiguous range of the token file, or a row of whole documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from lmworks.shards.batch import IGNORE, PADDING, fill_padding
from lmworks.shards.order import LocatedSequences, Order
from lmworks.shards.row_plans import RowPlans
from lmworks.shards.token_stream import TokenStream


@dataclass(frozen=True)
class Filled:
    """n sequences of L tokens: tokens and labels (n, L) int32, and where segments begin in the n * L tokens, ascending int64."""

    tokens: np.ndarray
    labels: np.ndarray
    begins: np.ndarray


class Sequences(Protocol):
    """Reads the sequences that `Order.locate` returns."""

    order: Order

    def fill(self, phase: int, found: LocatedSequences) -> Filled:
        """Their tokens, labels and boundaries."""

    def ranges(self, phase: int, found: LocatedSequences) -> Iterator[tuple[Path, int, int]]:
        """(shard, first token, end) of everything that `fill` would read."""

    def token_ranges(self, phase: int, source: int, sequence: int) -> list[tuple[int, int]]:
        """The tokens of one sequence, as ranges [start, stop) in its source."""


class Concatenated:
    """Documents end to end: a sequence is L + 1 tokens of the file, wherever documents begin in it."""

    def __init__(self, order: Order, streams: Mapping[str, TokenStream]) -> None:
        self.order, self._streams = order, [streams[name] for name in order.sources]

    def fill(self, phase: int, found: LocatedSequences) -> Filled:
        length, rows = self.order.timeline.phases[phase].sequence_length, len(found.start)
        text = np.empty((rows, length + 1), np.int32)
        begins = [np.arange(rows, dtype=np.int64) * length]
        none = np.empty(0, np.int64)
        ends_row, ends_at = [none], [none]  # of a rank without sequences
        for index in np.unique(found.source):
            mine, stream = np.flatnonzero(found.source == index), self._streams[index]
            read = np.empty((len(mine), length + 1), np.int32)
            stream.gather(found.start[mine], length + 1, read)
            text[mine] = read
            row, offset = stream.boundaries(found.start[mine], length)
            ends_row.append(mine[row])
            ends_at.append(offset)
            inside = offset < length  # one that begins behind the sequence only ends the document before it
            begins.append(mine[row[inside]] * length + offset[inside])
        labels = text[:, 1:].copy()
        labels[np.concatenate(ends_row), np.concatenate(ends_at) - 1] = IGNORE
        return Filled(np.ascontiguousarray(text[:, :-1]), labels, np.unique(np.concatenate(begins)))

    def ranges(self, phase: int, found: LocatedSequences) -> Iterator[tuple[Path, int, int]]:
        length = self.order.timeline.phases[phase].sequence_length
        for index in np.unique(found.source):
            yield from self._streams[index].token_ranges(found.start[found.source == index], length + 1)

    def token_ranges(self, phase: int, source: int, sequence: int) -> list[tuple[int, int]]:
        length = self.order.timeline.phases[phase].sequence_length
        start = self.order.share(phase, self.order.sources[source]).start + sequence * length
        return [(start, start + length)]


class BestFit:
    """Rows of whole documents; see `lmworks.shards.row_plans`.

    The unused end of a row is padding (`fill_padding`): a segment of its own, without labels.
    """

    def __init__(self, order: Order, streams: Mapping[str, TokenStream], plans: RowPlans) -> None:
        self.order, self._streams, self._plans = order, [streams[name] for name in order.sources], plans

    def fill(self, phase: int, found: LocatedSequences) -> Filled:
        length, rows = self.order.timeline.phases[phase].sequence_length, len(found.source)
        tokens, labels = np.full((rows, length), PADDING, np.int32), np.full((rows, length), IGNORE, np.int32)
        begins: list[int] = []
        for row in range(rows):
            source, at = int(found.source[row]), 0
            shard, pieces = self._pieces(phase, source, int(found.sequence[row]))
            file = self._streams[source].file(shard)
            for start, inputs in pieces.tolist():
                text = file.read(start, start + inputs + 1)
                tokens[row, at : at + inputs], labels[row, at : at + inputs] = text[:-1], text[1:]
                begins.append(row * length + at)
                at += inputs
            if at < length:
                begins.append(row * length + at)
                fill_padding(tokens[row], at)
        return Filled(tokens, labels, np.array(begins, np.int64))

    def ranges(self, phase: int, found: LocatedSequences) -> Iterator[tuple[Path, int, int]]:
        for source, sequence in zip(found.source.tolist(), found.sequence.tolist(), strict=True):
            shard, pieces = self._pieces(phase, source, sequence)
            for start, inputs in pieces.tolist():
                yield self._streams[source].prefixes[shard], start, start + inputs + 1

    def token_ranges(self, phase: int, source: int, sequence: int) -> list[tuple[int, int]]:
        shard, pieces = self._pieces(phase, source, sequence)
        base = int(self._streams[source].offsets[shard])
        return [(base + start, base + start + inputs) for start, inputs in pieces.tolist()]

    def _pieces(self, phase: int, source: int, sequence: int) -> tuple[int, np.ndarray]:
        share = self.order.share(phase, self.order.sources[source])
        return self._plans.row(share.source, share.borders, self.order.timeline.phases[phase].sequence_length, sequence)
