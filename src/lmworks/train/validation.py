"""Validation inside the run: bits per byte per domain, on the same text every time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

from lmworks.model import Transformer
from lmworks.shards.batch import Batch
from lmworks.shards.tuning import TuningBatches


@torch.no_grad()
def nats(model: Transformer, batch: Batch) -> float:
    """Summed cross-entropy of a batch under the model as it is in evaluation."""
    device = model.embedding.weight.device
    tokens, labels, cu_seqlens = (torch.from_numpy(array).to(device) for array in (batch.tokens, batch.labels, batch.cu_seqlens))
    loss = model.loss(tokens, labels, cu_seqlens)
    return float(loss.head.cross_entropy)


def validate(model: Transformer, held_out: Mapping[str, Iterable[Batch]]) -> dict[str, float]:
    """Metrics `validation/...` per domain and over all; the model comes back in the mode it was in."""
    was_training = model.training
    model.eval()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    try:
        for domain, batches in held_out.items():
            for batch in batches:
                measured = (nats(model, batch), batch.valid_tokens, batch.text_bytes)
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


def validate_conversations(model: Transformer, held_out: TuningBatches) -> dict[str, float]:
    """Mean loss over the assistant's tokens of held-out conversations."""
    was_training = model.training
    model.eval()
    try:
        batches = [held_out.batch(step) for step in range(held_out.steps)]
        total, tokens = sum(nats(model, batch) for batch in batches), sum(batch.valid_tokens for batch in batches)
    finally:
        model.train(was_training)
    return {"validation/loss": total / max(tokens, 1)}
