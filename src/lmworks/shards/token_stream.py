"""The tokens of one source as one sequence, over all of its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from lmworks.errors import UserError
from lmworks.shards.indexed import IndexedFile


class TokenStream:
    """The shards of a source end to end; positions count tokens from the start of the first shard.

    `lengths` are the tokens of each shard as the manifest states them, so that no file is opened before it is read. `open_file` opens
    a shard; it may close the least recently used ones.
    """

    def __init__(
        self, prefixes: Sequence[Path], lengths: Sequence[int], open_file: Callable[[Path], IndexedFile] | None = None
    ) -> None:
        self.prefixes = list(prefixes)
        self.offsets = np.concatenate(([0], np.cumsum(np.asarray(lengths, np.int64)))).astype(np.int64)
        self._open = open_file or cache(IndexedFile)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def file(self, number: int) -> IndexedFile:
        """The opened shard; a UserError if it holds another number of tokens than the manifest states."""
        opened = self._open(self.prefixes[number])
        promised = int(self.offsets[number + 1] - self.offsets[number])
        if len(opened) != promised:
            raise UserError(
                f"token shard {opened.prefix}.bin holds {len(opened):,} tokens where manifest.json states {promised:,}; "
                "delete the shards folder and run the same command again"
            )
        return opened

    def token_ranges(self, starts: np.ndarray, length: int) -> Iterator[tuple[Path, int, int]]:
        """(shard, first token in it, end) of everything that `gather` would read."""
        first = np.searchsorted(self.offsets, starts, side="right") - 1
        for start, number in zip(starts.tolist(), first.tolist(), strict=True):
            stop = start + length
            while start < stop:
                upto = min(stop, int(self.offsets[number + 1]))
                yield self.prefixes[number], start - int(self.offsets[number]), upto - int(self.offsets[number])
                start, number = upto, number + 1

    def gather(self, starts: np.ndarray, length: int, out: np.ndarray) -> None:
        """Fill `out` (len(starts), length) with the tokens from each start on."""
        first = np.searchsorted(self.offsets, starts, side="right") - 1
        last = np.searchsorted(self.offsets, starts + length, side="left") - 1
        for row, (start, number, end) in enumerate(zip(starts.tolist(), first.tolist(), last.tolist(), strict=True)):
            if number == end:
                local = start - int(self.offsets[number])
                out[row] = self.file(number).read(local, local + length)
            else:
                pieces = [piece for _, _, piece in self._pieces(start, start + length)]
                out[row] = np.concatenate(pieces)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """(shard, local start, tokens) of each shard's part of [start, stop)."""
        number = int(np.searchsorted(self.offsets, start, side="right")) - 1
        while start < stop:
            base, end = int(self.offsets[number]), int(self.offsets[number + 1])
            upto = min(stop, end)
            yield number, start - base, self.file(number).read(start - base, upto - base)
            start, number = upto, number + 1

    def boundaries(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Where documents begin inside [start + 1, start + length] of each start: (row, offset from the start), both int64."""
        rows, offsets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        first = int(np.searchsorted(self.offsets, starts.min(), side="right")) - 1
        stop = int(np.searchsorted(self.offsets, starts.max() + length, side="right"))
        for number in range(first, min(stop, len(self.prefixes))):
            base, end = self.offsets[number], self.offsets[number + 1]
            touched = np.flatnonzero((starts < end) & (starts + length >= base))
            if touched.size == 0:
                continue
            file, local = self.file(number), starts[touched] - base
            before, until = file.documents_until(local), file.documents_until(local + length)
            counts = until - before
            document = np.repeat(before - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
            rows.append(np.repeat(touched, counts))
            offsets.append(file.document_start(document) - np.repeat(local, counts))
        return np.concatenate(rows), np.concatenate(offsets)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """The documents in [start, stop): (shard, document of that shard, first and past-the-last token inside the document)."""
        for number, local, tokens in self._pieces(start, stop):
            file, end = self.file(number), local + len(tokens)
            while local < end:
                document = int(file.documents_until(np.array([local]))[0]) - 1
                begin, after = file.document_start(np.array([document, document + 1])).tolist()
                upto = min(end, after)
                yield number, document, local - begin, upto - begin
                local = upto
