"""Validation during training: bits per byte per domain, on the same text each time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from lmworks.parallel.parallel_model import ParallelModel
from lmworks.shards.read.batch import Batch
from lmworks.shards.read.tuning_batches import TuningBatches


def validate(model: ParallelModel, held_out: Mapping[str, Iterable[Batch]]) -> dict[str, float]:
    """Metrics `validation/...` per domain and over all domains; the mode of the model (train or eval) is restored."""
    was_training = model.training
    model.eval()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    try:
        for domain, batches in held_out.items():
            sizes: list[tuple[int, int]] = []
            losses = model.summed_cross_entropies(_sized(batches, sizes))
            for measured in [(loss, *size) for loss, size in zip(losses, sizes, strict=True)]:
                for key in (domain, ""):
                    totals[key] = [sum(pair) for pair in zip(totals[key], measured, strict=True)]
    finally:
        model.train(was_training)
    values = {}
    for domain, (loss, tokens, size) in totals.items():
        prefix = f"validation/{domain}" if domain else "validation"
        values[f"{prefix}/loss"] = loss / max(tokens, 1)
        values[f"{prefix}/bits_per_byte"] = loss / math.log(2) / max(size, 1)
    return values


def _sized(batches: Iterable[Batch], sizes: list[tuple[int, int]]) -> Iterator[Batch]:
    """The batches, read one after another; the labels and the bytes of each are appended to `sizes`."""
    for batch in batches:
        sizes.append((batch.valid_tokens, batch.text_bytes))
        yield batch


def validate_conversations(model: ParallelModel, held_out: TuningBatches) -> dict[str, float]:
    """Mean loss over the assistant's tokens of held-out conversations."""
    was_training = model.training
    model.eval()
    try:
        batches = [held_out.batch(step) for step in range(held_out.steps)]
        total, tokens = sum(model.summed_cross_entropies(batches)), sum(batch.valid_tokens for batch in batches)
    finally:
        model.train(was_training)
    return {"validation/loss": total / max(tokens, 1)}
