"""Evaluation during pretraining, on all ranks of any layout: a small sample of each multiple-choice set, in cloze form without examples.

Continuations with their contexts are packed as documents into rows of the length that the run trains on. Every rank runs its share of the
rows, as in validation, so that a sharded model is never gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lmworks.errors import Unavailable
from lmworks.evaluate.logprobs import Request
from lmworks.evaluate.sets import benchmarks
from lmworks.evaluate.sets.benchmarks import GENERATION
from lmworks.evaluate.sets.forms import Answered, Encoder, requests_of, score
from lmworks.evaluate.sets.items import ChoiceItem, score_name
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import IGNORE, Batch
from lmworks.ui.terminal import console

Evaluation = Callable[[ParallelModel], dict[str, float]]


def make_evaluation(recipe: Recipe, tokenizer: Encoder, length: int, rows: int, ranks: Ranks) -> Evaluation | None:
    """The evaluation that a run makes every `evaluate.every`, in batches of `rows` rows of `length` tokens; None without a set for it.

    All ranks call it together; the first alone reads the data. A set without data is reported and omitted.
    """
    items, requests = ranks.first(lambda: _read(recipe, tokenizer, length))
    return LoopEvaluation(items, requests, length, rows) if items else None


def _read(recipe: Recipe, tokenizer: Encoder, length: int) -> tuple[list[ChoiceItem], list[Request]]:
    items: list[ChoiceItem] = []
    requests: list[Request] = []
    for one in recipe.evaluate.benchmarks:
        if one.file is None and one.name in GENERATION:
            continue
        try:
            sample = benchmarks.load(one, recipe.evaluate.items_in_loop(one), 0).items
        except Unavailable as reason:
            console.print(f"{one.name} is not evaluated during training: {reason}", style="yellow")
            continue
        found = [item for item in sample if isinstance(item, ChoiceItem)]
        asked = [requests_of([item], tokenizer) for item in found]
        if cut := sum(any(len(context) + len(rest) > length + 1 for context, rest in of_item) for of_item in asked):
            console.print(
                f"{one.name} during training: {cut} of {len(found)} items are longer than {length:,} tokens, so they lose their beginnings",
                style="yellow", soft_wrap=True,
            )  # fmt: skip
        items += found
        requests += (request for of_item in asked for request in of_item)
    return items, requests


@dataclass(frozen=True)
class _Place:
    """Where the labels of a continuation are: row, and first and last position."""

    row: int
    start: int
    stop: int


class LoopEvaluation:
    """Scores items with a model in training. `requests` are the continuations of all items, in order."""

    def __init__(self, items: Sequence[ChoiceItem], requests: Sequence[Request], length: int, rows: int) -> None:
        self.items, self.requests = items, requests
        self._batches, self._places = pack(requests, length, rows)

    def __call__(self, model: ParallelModel) -> dict[str, float]:
        """Metrics `eval/...`; the mode of the model (train or eval) is restored."""
        was_training = model.training
        model.eval()
        try:
            # on the device until the last batch, so that the host waits once
            nats_BT = torch.cat([model.token_cross_entropy_on_device(batch) for batch in self._batches]).cpu().double().numpy()
        finally:
            model.train(was_training)
        logprobs = [-float(nats_BT[place.row, place.start : place.stop].sum()) for place in self._places]
        values: dict[str, float] = {}
        start = 0
        sets: dict[str, list[Answered]] = {}
        for item in self.items:
            span = slice(start, start := start + len(item.continuations))
            tokens = tuple(len(rest) for _, rest in self.requests[span])
            sets.setdefault(item.set, []).append(Answered(item, tuple(logprobs[span]), tokens))
        for name, answered in sets.items():
            scored = score(answered)
            values |= {f"eval/{name}/{_FORM}": scored.accuracy, f"eval/{name}/items": scored.n, f"eval/{name}/chance": scored.chance}
            values[f"eval/{name}/bits_per_byte"] = sum(one.bits_per_byte for one in answered) / len(answered)
        return values


_FORM = score_name("", "cloze", 0).strip("/").replace("/", "-")


def pack(requests: Sequence[Request], length: int, rows: int) -> tuple[list[Batch], list[_Place]]:
    """The requests as documents in rows of `length` tokens, `rows` of them per batch, and the place of each one's labels.

    A row takes the longest document that still fits. A document that is too long loses the beginning of its context; a continuation that
    is too long by itself loses its end, so that it fits at all.
    """
    documents = []
    for context, rest in requests:
        ids = [*context, *rest[:length]][-(length + 1) :]
        documents.append((ids[:-1], ids[1:], min(len(rest), length)))
    free: list[int] = []
    starts: list[list[int]] = []
    places: list[_Place | None] = [None] * len(documents)
    for index in sorted(range(len(documents)), key=lambda index: -len(documents[index][0])):
        size = len(documents[index][0])
        row = next((row for row, room in enumerate(free) if room >= size), None)
        if row is None:
            row = len(free)
            free.append(length)
            starts.append([])
        begin = length - free[row]
        starts[row].append(begin)
        free[row] -= size
        places[index] = _Place(row, begin + size - documents[index][2], begin + size)
    count = -(-len(free) // rows) * rows  # rows without documents fill the last batch: all batches have one shape
    tokens, labels = np.zeros((count, length), np.int32), np.full((count, length), IGNORE, np.int32)
    found = [place for place in places if place is not None]
    for (inputs, targets, learned), place in zip(documents, found, strict=True):
        tokens[place.row, place.stop - len(inputs) : place.stop] = inputs
        labels[place.row, place.start : place.stop] = targets[-learned:]
    batches = []
    for first in range(0, count, rows):
        edges = [(row - first) * length + at for row in range(first, first + rows) for at in _edges(row, starts, free, length)]
        cu_seqlens = np.array([*edges, rows * length], np.int32)
        batches.append(Batch(tokens[first : first + rows], labels[first : first + rows], cu_seqlens, 0, 0))
    return batches, found


def _edges(row: int, starts: Sequence[Sequence[int]], free: Sequence[int], length: int) -> list[int]:
    """Where documents begin in a row; what is left at its end is one too."""
    if row >= len(starts):
        return [0]
    return [*starts[row], *([length - free[row]] if free[row] else [])]
