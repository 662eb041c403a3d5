"""The special values in the arrays of a batch.

The arrays that a step trains on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

IGNORE = -100  # a label without loss, as `ignore_index` of torch.nn.functional.cross_entropy
PADDING = 0  # the token in places that no document fills


@dataclass(frozen=True)
class Batch:
    """Sequences to learn from. B sequences of T tokens.

    tokens: (B, T) int32.
    labels: (B, T) int32, the token that follows; IGNORE where there is no loss (after the end of a document, padding, prompts).
    cu_seqlens: (n + 1,) int32, where documents begin in the B * T concatenated tokens, and B * T at the end. Every sequence begins a
        document. The attention mask and the positions both derive from it.
    sequence_bytes: (B,) int64 or None, the bytes of text of the valid labels of each sequence (validation only).
    weights: (B, T) float32 or None, factors of the loss of each label (preference optimization and reinforcement learning only).
    """

    tokens: np.ndarray
    labels: np.ndarray
    cu_seqlens: np.ndarray
    phase: int
    step: int
    sequence_bytes: np.ndarray | None = None
    weights: np.ndarray | None = None

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
        )

    @cached_property
    def valid_tokens(self) -> int:
        """The number of labels with loss."""
        return int(np.count_nonzero(self.labels != IGNORE))

    @property
    def text_bytes(self) -> int:
        """Bytes of text of the valid labels; validation batches only."""
        assert self.sequence_bytes is not None, "only validation batches know their bytes"
        return int(self.sequence_bytes.sum())
