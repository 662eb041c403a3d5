"""Advice on deduplication settings: what they find, and which settings suit the kinds of text in the corpus."""

from __future__ import annotations

from collections.abc import Iterator

from lmworks.recipe.schema.corpus import Corpus
from lmworks.recipe.schema.dedup import Minhash


def changed_words(node: Minhash) -> int:
    """The number of words of which one may differ in a long copy that is still found: (1 - 1/words)^n of its n-grams are unchanged."""
    same = 2 * node.threshold / (1 + node.threshold)
    return round(1 / (1 - same ** (1 / node.ngram)))


def advice(corpus: Corpus) -> Iterator[str]:
    """Lines that say what is found, and for which sources other settings are usual."""
    dedup = corpus.dedup
    if dedup.minhash:
        found = f"near-duplicates: copies in which up to one word in {changed_words(dedup.minhash)} differs (threshold "
        yield found + f"{dedup.minhash.threshold:g}) are dropped, others are kept; docs/quality.md lists thresholds by kind of text"
    web = [source.name for source in corpus.sources if source.domain == "web"]
    if web and dedup.minhash and dedup.minhash.threshold > 0.7:
        yield f"{', '.join(web)}: web pages are copied with more changes; dedup.minhash.threshold: 0.6 is usual"
    if web and not dedup.substring:
        yield f"{', '.join(web)}: passages that pages share are kept; dedup.substring: {{}} cuts them"
    code = [source.name for source in corpus.sources if source.domain == "code" and source.dedup.threshold is None]
    if code and dedup.minhash and dedup.minhash.threshold < 0.7:
        yield f"{', '.join(code)}: files of one project are similar without being copies; set dedup: {{threshold: 0.85}} on the source"
