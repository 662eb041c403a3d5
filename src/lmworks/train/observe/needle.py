"""Needles in a haystack: facts hidden in held-out text, and whether the model retrieves the one that is queried.

A sequence is filler text, a few sentences "The code of the red door is harbour." at chosen depths, and at its end the beginning of one of
them. The model is right if it gives the value of that sentence a higher likelihood than the values of the others in the sequence. A model
that only knows that a code comes next, or that repeats the last one, scores at chance (after Kamradt's test; with distractors as in
RULER, arXiv:2404.06654).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmworks.parallel.parallel_model import ParallelModel
from lmworks.shards.format.labels import IGNORE
from lmworks.shards.read.batch import Batch
from lmworks.tokenizer.tokenizer import Tokenizer

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
