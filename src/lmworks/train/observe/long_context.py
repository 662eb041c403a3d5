"""What a longer context is good for, measured inside the run at the length of the phase: the loss by position, and needles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from lmworks.errors import UserError
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.progress import console
from lmworks.recipe.recipe import Recipe
from lmworks.shards.batch import Batch, Batches
from lmworks.shards.packing import IGNORE
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.curriculum import PhaseSettings
from lmworks.train.observe.needle import FACTS, Needle, ask, needles

_FIRST, _TIMES = 64, 4  # stretches of positions: up to 64, and then each up to four times further
_ROWS = 4  # of the text that reaches furthest
_BYTES = 16  # of text per token, more than enough to fill a row


class Far:
    """Held-out rows as long as those of each phase, and needles in them where `train.phases[].needle` says so."""

    def __init__(self, batches: Batches, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._batches, self._recipe, self._tokenizer = batches, recipe, tokenizer
        self._rows: dict[int, list[Batch]] = {}
        self._needles: dict[int, list[Needle]] = {}

    def measure(self, model: ParallelModel, phase: PhaseSettings) -> dict[str, float]:
        """Metrics `validation/position/...` and `needle/...`; the model comes back in the mode it was in."""
        length = phase.sequence_length
        if length not in self._rows:
            self._rows[length] = self._furthest(length)
        was_training = model.training
        model.eval()
        try:
            values = loss_by_position(model, self._rows[length])
            if self._recipe.train.phases[phase.index].needle:
                values |= ask(model, self._asked(length))
                if model.ranks.is_first:
                    found = values["needle/accuracy"]
                    console.print(f"{found:.0%} of {len(self._needles[length])} needles found (chance is {1 / FACTS:.0%})", style="dim")
        finally:
            model.train(was_training)
        return values

    def _furthest(self, length: int) -> list[Batch]:
        """The held-out rows, each a batch, that have most labels in the last three quarters of the context."""
        limit = max(self._recipe.train.validate_bytes_per_domain, _BYTES * _ROWS * length)
        domains = self._batches.manifest.domains()
        rows = [row for domain in domains for row in self._batches.validation(domain, length, 1, limit)]
        rows.sort(key=lambda row: -int(((row.labels != IGNORE) & (positions(row) >= length // _TIMES)).sum()))
        return rows[:_ROWS]

    def _asked(self, length: int) -> list[Needle]:
        if length not in self._needles:
            filler = np.concatenate([row.tokens.flatten() for row in self._rows[length]])
            found = needles(self._tokenizer, filler, sorted({max(length // 4, _FIRST), length}), self._recipe.seed)
            if not found:
                raise UserError(f"sequences of {length:,} tokens have no room for needles; leave train.phases[].needle out of short phases")
            self._needles[length] = found
        return self._needles[length]


def loss_by_position(model: ParallelModel, rows: Sequence[Batch]) -> dict[str, float]:
    """Mean loss by where in its document a token stands: `validation/position/256` is positions 256 to 1,023."""
    values = {}
    for start, stop in stretches(max((row.tokens.shape[1] for row in rows), default=0)):
        parts = [_only(row, start, stop) for row in rows]
        parts = [part for part in parts if part.valid_tokens]
        if parts:
            values[f"validation/position/{start}"] = sum(map(model.summed_cross_entropy, parts)) / sum(part.valid_tokens for part in parts)
    return values


def stretches(length: int) -> Iterator[tuple[int, int]]:
    """[0, 64), [64, 256), [256, 1024) and so on, up to the length."""
    starts = [0]
    while (start := _FIRST * _TIMES ** (len(starts) - 1)) < length:
        starts.append(start)
    return pairwise([*starts, length])


def positions(batch: Batch) -> np.ndarray:
    """The place of each token in its document, (B, T)."""
    lengths = np.diff(batch.cu_seqlens)
    return (np.arange(batch.tokens.size) - np.repeat(batch.cu_seqlens[:-1], lengths)).reshape(batch.tokens.shape)


def _only(batch: Batch, start: int, stop: int) -> Batch:
    place = positions(batch)
    return replace(batch, labels=np.where((start <= place) & (place < stop), batch.labels, IGNORE))
