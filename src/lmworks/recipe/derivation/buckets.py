"""A mixture that names a source with quality buckets, in terms of the buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmworks.recipe.schema.corpus import Source


def expand(mixture: Mapping[str, float], sources: Sequence[Source], amounts: Mapping[str, int]) -> dict[str, float]:
    """The mixture with each bucketed source replaced by its buckets, in proportion to weight times `amounts` (tokens or bytes by output).

    So a bucket of weight 3 is read three times as often, per token, as one of weight 1, whatever their sizes. A bucket that a mixture
    names itself keeps what it was given, and is given its part of the source on top. A source of which no bucket has text stays as it
    is, for the caller to report. The weights sum to what they summed to.
    """
    buckets = {source.name: source.buckets for source in sources}
    expanded: dict[str, float] = {}
    for name, weight in mixture.items():
        drawn = {f"{name}.{bucket.name}": bucket.weight * amounts.get(f"{name}.{bucket.name}", 0) for bucket in buckets.get(name, ())}
        total = sum(drawn.values())
        shares = {output: weight * part / total for output, part in drawn.items() if part} if total else {name: weight}
        for output, share in shares.items():
            expanded[output] = expanded.get(output, 0.0) + share
    return expanded
