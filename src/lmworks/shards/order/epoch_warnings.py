"""Warnings about sources that a run reads too often."""

from __future__ import annotations

from collections.abc import Iterator

from lmworks.shards.order.order import Order


def epoch_warnings(order: Order, most: float) -> Iterator[str]:
    """A line for each source that is read more than `most` times, in one phase or over all phases."""
    overall = order.epochs_by_source()
    for share in order.shares():
        if share.epochs > most:
            yield f"phase {share.phase} reads source {share.source} {share.epochs:.1f} times, more than shards.warn_epochs {most:g}"
            overall.pop(share.source, None)
    for source, times in overall.items():
        if times > most:
            yield f"source {source} is read {times:.1f} times over all phases, more than shards.warn_epochs {most:g}"
