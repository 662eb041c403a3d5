"""What each packing costs: documents that are cut, and tokens that are padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmworks.shards.format.indexed import IndexedFile
from lmworks.shards.packing.row_plans import pack

_SAMPLED = 100_000  # documents of a shard that are packed for the estimate


@dataclass(frozen=True)
class Waste:
    """The cost of each packing, on a sample of documents.

    cut: share of the documents that fit into a sequence and are cut by `concatenate` (by `best_fit` none is).
    padding: share of the tokens of a batch that `best_fit` leaves empty (`concatenate` none).
    """

    documents: int
    cut: float
    padding: float


def waste(file: IndexedFile, length: int, most: int = _SAMPLED) -> Waste:
    """Both packings of the first documents of a shard, in sequences of `length` tokens."""
    count = min(most, file.documents)
    borders = file.document_start(np.arange(count + 1))
    inputs = np.diff(borders) - 1
    fits = (inputs >= 1) & (inputs <= length)
    cut = fits & (borders[:-1] // length != (borders[1:] - 2) // length)
    ends, _ = pack(file, 0, count, length)
    return Waste(count, float(cut.sum() / max(1, fits.sum())), float(1 - inputs.sum() / max(1, len(ends) * length)))
