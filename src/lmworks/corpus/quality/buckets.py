"""Assignment of documents to the quality buckets of their source."""

from __future__ import annotations

from lmworks.corpus.document import Document
from lmworks.recipe.schema.corpus import Source


def bucket_of(document: Document, source: Source) -> str | None:
    """The name of the bucket with the highest minimum that the document reaches; None if the source has no buckets.

    A document that reaches no minimum, or has no value, belongs to the lowest bucket.
    """
    if not source.buckets:
        return None
    value = document.facts.get(source.bucket_by)
    ranked = sorted(source.buckets, key=lambda bucket: bucket.minimum)
    reached = [bucket for bucket in ranked if isinstance(value, int | float) and value >= bucket.minimum]
    return (reached or ranked)[-1 if reached else 0].name
