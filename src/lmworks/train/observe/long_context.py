"""Evaluation of long context during training, at the sequence length of the phase: loss by position, and needles in a haystack.

Needles are facts hidden in held-out text; does the model retrieve the one that is queried? A sequence is filler text, a few sentences "The
code of the red door is harbour." at chosen depths, and at its end the beginning of one of them. The model is right if it gives the value of
that sentence a higher likelihood than the values of the others in the sequence. A model that only knows that a code comes next, or that
repeats the last one, scores at chance (after Kamradt's test; with distractors as in RULER, arXiv:2404.06654).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from lmworks.errors import UserError
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import IGNORE, Batch
from lmworks.shards.batches import Batches
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.curriculum import PhaseSettings
from lmworks.ui.terminal import console

FACTS = 4  # in a sequence; chance is 1 / FACTS
DEPTHS = (10, 30, 50, 70, 90)  # percent of the filler before the fact
_EACH = 2  # sequences per depth and length
_COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")
_THINGS = ("door", "box", "house", "book", "wall", "table", "road", "ship")
_VALUES = (
    "water", "stone", "river", "paper", "music", "garden", "winter", "summer", "silver", "window", "bridge", "island", "market", "letter",
    "engine", "forest", "harbour", "mountain", "number", "table", "school", "doctor", "train", "horse",
)  # fmt: skip


@dataclass(frozen=True)
class Needle:
    """One sequence with each of the values at its end: batches of one sequence with labels at the value only. `right` is the true one."""

    length: int
    depth: int
    ends: tuple[Batch, ...]
    right: int


def make_needles(tokenizer: Tokenizer, filler: np.ndarray, lengths: Sequence[int], seed: int) -> list[Needle]:
    """Sequences that depend only on the arguments, with `filler` repeated as needed; lengths without room for the facts are omitted."""
    values = _alike([tokenizer.encode(f" {value}.") for value in _VALUES])
    found = []
    for length in lengths:
        for depth in DEPTHS:
            for number in range(_EACH):
                draw = np.random.default_rng((seed, length, depth, number))
                if (needle := _needle(tokenizer, filler, length, depth, values, draw)) is not None:
                    found.append(needle)
    return found


def evaluate_needles(model: ParallelModel, needles: Sequence[Needle]) -> dict[str, float]:
    """Metrics `needle/...`: the fraction retrieved, in total and by length and depth, and the fraction expected by chance."""
    hits: dict[str, list[bool]] = {}
    for needle in needles:
        nats = model.summed_cross_entropies(needle.ends)
        for name in ("needle/accuracy", f"needle/{needle.length}/{needle.depth}"):
            hits.setdefault(name, []).append(int(np.argmin(nats)) == needle.right)
    return {name: sum(found) / len(found) for name, found in hits.items()} | ({"needle/chance": 1 / FACTS} if needles else {})


def _alike(values: list[list[int]]) -> list[list[int]]:
    """The largest set of values with the same number of tokens: shorter ones would have a higher likelihood."""
    lengths = [len(value) for value in values]
    most = max(sorted(set(lengths)), key=lengths.count)
    return [value for value in values if len(value) == most]


def _needle(
    tokenizer: Tokenizer, filler: np.ndarray, length: int, depth: int, values: list[list[int]], draw: np.random.Generator
) -> Needle | None:
    names = draw.choice(len(_COLOURS) * len(_THINGS), FACTS, replace=False)
    keys = [f" The code of the {_COLOURS[name % len(_COLOURS)]} {_THINGS[name // len(_COLOURS)]} is" for name in names]
    starts = [tokenizer.encode(key) for key in keys]
    codes = [values[index] for index in draw.choice(len(values), FACTS, replace=False)]
    right = int(draw.integers(FACTS))
    around = length + 1 - sum(map(len, starts)) - sum(map(len, codes)) - len(starts[right]) - len(codes[right])
    if around < length // 2:
        return None
    text = np.roll(np.resize(filler, max(around, len(filler))), -int(draw.integers(len(filler))))[:around]
    depths = draw.permutation([other for other in DEPTHS if other != depth])[: FACTS - 1].tolist()
    depths.insert(right, depth)
    row: list[int] = []
    begin = 0
    for index in np.argsort(depths):
        end = around * depths[index] // 100
        row += [*text[begin:end].tolist(), *starts[index], *codes[index]]
        begin = end
    row += [*text[begin:].tolist(), *starts[right]]
    return Needle(length, depth, tuple(_batch([*row, *code], len(code)) for code in codes), right)


def _batch(row: list[int], learned: int) -> Batch:
    tokens = np.array([row], np.int32)
    labels = np.full_like(tokens[:, 1:], IGNORE)
    labels[:, -learned:] = tokens[:, -learned:]
    return Batch(tokens[:, :-1], labels, np.array([0, labels.size], np.int32), 0, 0)


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
        limit = max(self._recipe.train.validation_bytes_per_domain, _BYTES * _ROWS * length)
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
