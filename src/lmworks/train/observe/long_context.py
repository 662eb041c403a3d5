"""Evaluation of long context during training, at the sequence length of the phase: loss by position, and needles in a haystack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from lmworks.errors import UserError
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.progress import console
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.format.labels import IGNORE
from lmworks.shards.read.batch import Batch
from lmworks.shards.read.batches import Batches
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.curriculum import PhaseSettings
from lmworks.train.observe.needle import FACTS, Needle, evaluate_needles, make_needles

_FIRST, _TIMES = 64, 4  # ranges of positions: up to 64, and then each up to four times further
_ROWS = 4  # sequences to evaluate, those with the longest documents
_BYTES = 16  # of text per token, more than enough to fill a sequence


class LongContextEvaluator:
    """Evaluates held-out sequences of the length of each phase, with needles in them where `train.phases[].needle` is set."""

    def __init__(self, batches: Batches, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._batches, self._recipe, self._tokenizer = batches, recipe, tokenizer
        self._rows: dict[int, list[Batch]] = {}
        self._needles: dict[int, list[Needle]] = {}

    def evaluate(self, model: ParallelModel, phase: PhaseSettings) -> dict[str, float]:
        """Metrics `validation/position/...` and `needle/...`; the mode of the model (train or eval) is restored."""
        length = phase.sequence_length
        if length not in self._rows:
            self._rows[length] = self._longest_sequences(length)
        was_training = model.training
        model.eval()
        try:
            values = loss_by_position(model, self._rows[length])
            if self._recipe.train.phases[phase.index].needle:
                values |= evaluate_needles(model, self._needles_of(length))
                if model.ranks.is_first:
                    found = values["needle/accuracy"]
                    console.print(f"{found:.0%} of {len(self._needles[length])} needles found (chance is {1 / FACTS:.0%})", style="dim")
        finally:
            model.train(was_training)
        return values

    def _longest_sequences(self, length: int) -> list[Batch]:
        """The held-out sequences, each a batch, with the most labels in the last three quarters of the context."""
        limit = max(self._recipe.train.validate_bytes_per_domain, _BYTES * _ROWS * length)
        domains = self._batches.manifest.domains()
        rows = [row for domain in domains for row in self._batches.validation(domain, length, 1, limit)]
        rows.sort(key=lambda row: -int(((row.labels != IGNORE) & (positions(row) >= length // _TIMES)).sum()))
        return rows[:_ROWS]

    def _needles_of(self, length: int) -> list[Needle]:
        if length not in self._needles:
            filler = np.concatenate([row.tokens.flatten() for row in self._rows[length]])
            found = make_needles(self._tokenizer, filler, sorted({max(length // 4, _FIRST), length}), self._recipe.seed)
            if not found:
                raise UserError(f"sequences of {length:,} tokens have no room for needles; leave train.phases[].needle out of short phases")
            self._needles[length] = found
        return self._needles[length]


def loss_by_position(model: ParallelModel, rows: Sequence[Batch]) -> dict[str, float]:
    """Mean loss by the position of a token in its document: `validation/position/256` is positions 256 to 1,023."""
    sums: dict[int, list[float]] = {}
    ranges = position_ranges(max((row.tokens.shape[1] for row in rows), default=0))
    parts = [(start, _only(row, start, stop)) for start, stop in ranges for row in rows]
    parts = [(start, part) for start, part in parts if part.valid_tokens]
    losses = model.summed_cross_entropies(part for _, part in parts)  # of all ranges: the host waits once
    for (start, part), loss in zip(parts, losses, strict=True):
        total = sums.setdefault(start, [0.0, 0.0])
        total[0] += loss
        total[1] += part.valid_tokens
    return {f"validation/position/{start}": loss / tokens for start, (loss, tokens) in sums.items()}


def position_ranges(length: int) -> Iterator[tuple[int, int]]:
    """[0, 64), [64, 256), [256, 1024) and so on, up to the length."""
    starts = [0]
    while (start := _FIRST * _TIMES ** (len(starts) - 1)) < length:
        starts.append(start)
    return pairwise([*starts, length])


def positions(batch: Batch) -> np.ndarray:
    """The position of each token in its document, (B, T)."""
    lengths = np.diff(batch.cu_seqlens)
    return (np.arange(batch.tokens.size) - np.repeat(batch.cu_seqlens[:-1], lengths)).reshape(batch.tokens.shape)


def _only(batch: Batch, start: int, stop: int) -> Batch:
    place = positions(batch)
    return replace(batch, labels=np.where((start <= place) & (place < stop), batch.labels, IGNORE))
