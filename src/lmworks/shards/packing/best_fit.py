"""Best-fit packing: whole pieces of text are packed into rows of one length, with little padding (Ding et al. 2024, arXiv:2404.10830)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmworks.shards.format.indexed import IndexedFile
from lmworks.shards.format.labels import IGNORE, PADDING
from lmworks.shards.format.token_stream import TokenStream


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece, (n,) int64: the longest first, each into the fullest row that still has room.

    Rows are renumbered in the order of their first piece, so that the result follows the order of the pieces.
    """
    lengths = np.asarray(lengths, np.int64)
    assert lengths.size == 0 or (lengths.min() > 0 and lengths.max() <= capacity), "pieces have from 1 to `capacity` tokens"
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    present = 0  # bit r is set when some row has exactly r free places
    row_of, rows = np.empty(len(lengths), np.int64), 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        need = int(lengths[piece])
        fitting = present >> need
        if fitting:
            room = need + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                present &= ~(1 << room)
        else:
            room, row, rows = capacity, rows, rows + 1
        row_of[piece] = row
        if room > need:
            with_room[room - need].append(row)
            present |= 1 << (room - need)
    _, first, inverse = np.unique(row_of, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first, kind="stable"), kind="stable")[inverse]


@dataclass(frozen=True)
class Pieces:
    """Pieces of text that are never split: first token and number of inputs, (n,) int64. The label of the last input is the next token."""

    starts: np.ndarray
    lengths: np.ndarray


class PackedRows:
    """Pieces of a source, packed into rows of `length` inputs. The unused end of a row is padding, as a document of its own."""

    def __init__(self, source: TokenStream | IndexedFile, pieces: Pieces, length: int) -> None:
        self.length, self._source, self._pieces = length, source, pieces
        row_of = best_fit(pieces.lengths, length)
        self._order = np.argsort(row_of, kind="stable")
        self._ends = np.cumsum(np.bincount(row_of)) if len(row_of) else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def pieces(self, row: int) -> np.ndarray:
        """The pieces in a row, in their order."""
        return self._order[self._ends[row - 1] if row else 0 : self._ends[row]]

    def fill(self, row: int, tokens: np.ndarray, labels: np.ndarray) -> list[int]:
        """Write a row into `tokens` and `labels`, both (length,); returns where its segments begin, the padding's included."""
        tokens[:], labels[:] = PADDING, IGNORE
        begins, at = [], 0
        for piece in self.pieces(row).tolist():
            start, count = int(self._pieces.starts[piece]), int(self._pieces.lengths[piece])
            text, learn = self._read(start, count + 1)
            tokens[at : at + count] = text[:-1]
            labels[at : at + count] = text[1:] if learn is None else np.where(learn[1:] != 0, text[1:].astype(np.int32), IGNORE)
            begins.append(at)
            at += count
        return [*begins, at] if at < self.length else begins

    def _read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        if isinstance(self._source, IndexedFile):
            mask = self._source.mask
            return self._source.tokens[start : start + count], None if mask is None else mask[start : start + count]
        out = np.empty((1, count), np.int32)
        self._source.gather(np.array([start]), count, out)
        return out[0], None
