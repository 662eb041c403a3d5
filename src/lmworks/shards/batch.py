"""The arrays that a step trains on, and the special values in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

IGNORE = -100  # a label without loss, as `ignore_index` of torch.nn.functional.cross_entropy
PADDING = 0  # the token in places that no document fills


def fill_padding(row: np.ndarray, used: int) -> None:
    """Repeat the first `used` tokens of a row, (T,), in the places behind them, which no document fills and which have no labels.

    Routers count all tokens: one token in all these places would always go to the same few experts, whose bias would fall for it.
    """
    if 0 < used < len(row):
        row[used:] = np.resize(row[:used], len(row) - used)


MOST_SOURCES = 64  # whose losses are told apart


def one_hot(source: Sequence[int], count: int) -> np.ndarray | None:
    """`Batch.sources` from the number of each row's source, -1 for a row without one; None for too many sources."""
    if count > MOST_SOURCES:
        return None
    return (np.asarray(source)[:, None] == np.arange(count)).astype(np.float32)


@dataclass(frozen=True)
class Batch:
    """Sequences to learn from. B sequences of T tokens.

    tokens: (B, T) int32.
    labels: (B, T) int32, the token that follows; IGNORE where there is no loss (after the end of a document, padding, prompts).
    cu_seqlens: (n + 1,) int32, where documents begin in the B * T concatenated tokens, and B * T at the end. Every sequence begins a
        document. The attention mask and the positions both derive from it.
    sequence_bytes: (B,) int64 or None, the bytes of text of the valid labels of each sequence (validation only).
    weights: (B, T) float32 or None, factors of the loss of each label (preference optimization and reinforcement learning only).
    sources: (B, S) float32 or None, 1 for the source that a sequence comes from, of S sources, else 0; all 0 in a row that fills up.
    """

    tokens: np.ndarray
    labels: np.ndarray
    cu_seqlens: np.ndarray
    phase: int
    step: int
    sequence_bytes: np.ndarray | None = None
    weights: np.ndarray | None = None
    sources: np.ndarray | None = None

    def __post_init__(self) -> None:
        assert self.cu_seqlens[-1] == self.tokens.size, f"documents end at {self.cu_seqlens[-1]}, the tokens at {self.tokens.size}"

    def rows(self, start: int, stop: int) -> Batch:
        """Rows [start, stop) as a batch: the share of a rank, or a micro-batch."""
        length = self.tokens.shape[1]
        first, last = np.searchsorted(self.cu_seqlens, (start * length, stop * length))
        return Batch(
            self.tokens[start:stop],
            self.labels[start:stop],
            self.cu_seqlens[first : last + 1] - np.int32(start * length),
            self.phase,
            self.step,
            None if self.sequence_bytes is None else self.sequence_bytes[start:stop],
            None if self.weights is None else self.weights[start:stop],
            None if self.sources is None else self.sources[start:stop],
        )

    def lengthened(self, length: int) -> Batch:
        """The same sequences with rows of `length` tokens: what is added is a document of its own without labels."""
        rows, before = self.tokens.shape
        if length == before:
            return self
        row, at = np.divmod(self.cu_seqlens[:-1].astype(np.int64), before)
        begins = np.sort(np.concatenate([row * length + at, np.arange(rows) * length + before, [rows * length]]))

        def longer(values: np.ndarray, fill: float) -> np.ndarray:
            return np.pad(values, ((0, 0), (0, length - before)), constant_values=fill)

        return replace(
            self, tokens=longer(self.tokens, PADDING), labels=longer(self.labels, IGNORE), cu_seqlens=begins.astype(np.int32),
            weights=None if self.weights is None else longer(self.weights, 0),
        )  # fmt: skip

    @cached_property
    def valid_tokens(self) -> int:
        """The number of labels with loss."""
        return int(np.count_nonzero(self.labels != IGNORE))

    @cached_property
    def tokens_by_source(self) -> tuple[int, ...]:
        """The number of labels with loss of each source; empty if the sources are not known."""
        if self.sources is None:
            return ()
        return tuple(map(int, (self.labels != IGNORE).sum(axis=1) @ self.sources))

    @property
    def text_bytes(self) -> int:
        """Bytes of text of the valid labels; validation batches only."""
        assert self.sequence_bytes is not None, "only validation batches know their bytes"
        return int(self.sequence_bytes.sum())
