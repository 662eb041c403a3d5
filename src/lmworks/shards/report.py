"""What a plan does to the text: how often it is read, and what either packing cuts or pads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lmworks.shards.indexed import IndexedFile
from lmworks.shards.order import Order
from lmworks.shards.rows import pack

_LOOKED_AT = 100_000  # documents from which the waste of a source is told


def warnings(order: Order, most: float) -> Iterator[str]:
    """Lines about sources that are read more than `most` times, in a phase or over all."""
    overall = order.readings()
    for share in order.shares():
        if share.epochs > most:
            yield f"phase {share.phase} reads source {share.source} {share.epochs:.1f} times, more than shards.warn_epochs {most:g}"
            overall.pop(share.source, None)
    for source, times in overall.items():
        if times > most:
            yield f"source {source} is read {times:.1f} times over all phases, more than shards.warn_epochs {most:g}"


@dataclass(frozen=True)
class Waste:
    """What the packings cost on some documents.

    cut: share of the documents that fit into a sequence and are cut by `concatenate` (by `best_fit` none is).
    padding: share of the tokens of a batch that `best_fit` leaves empty (`concatenate` none).
    """

    documents: int
    cut: float
    padding: float


def waste(file: IndexedFile, length: int, most: int = _LOOKED_AT) -> Waste:
    """Both packings of the first documents of a shard, in sequences of `length` tokens."""
    count = min(most, file.documents)
    borders = file.document_start(np.arange(count + 1))
    inputs = np.diff(borders) - 1
    fits = (inputs >= 1) & (inputs <= length)
    cut = fits & (borders[:-1] // length != (borders[1:] - 2) // length)
    ends, _ = pack(file, 0, count, length)
    return Waste(count, float(cut.sum() / max(1, fits.sum())), float(1 - inputs.sum() / max(1, len(ends) * length)))
