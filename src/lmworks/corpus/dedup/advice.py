"""What the settings of deduplication find, and what suits the corpus better, in words."""

from __future__ import annotations

from collections.abc import Iterator

from lmworks.recipe.schema.corpus import Corpus
from lmworks.recipe.schema.dedup import Minhash


def changed_words(node: Minhash) -> int:
    """One word in how many may be another in a long copy that is still found: n-grams without it are (1 - 1/words)^n of all."""
    same = 2 * node.threshold / (1 + node.threshold)
    return round(1 / (1 - same ** (1 / node.ngram)))


def advice(corpus: Corpus) -> Iterator[str]:
    """Lines about what is found, and about sources whose kind of text wants other settings."""
    dedup = corpus.dedup
    if dedup.minhash:
        found = f"near-duplicates: copies in which up to one word in {changed_words(dedup.minhash)} differs (threshold "
        yield found + f"{dedup.minhash.threshold:g}) are dropped, others stay; docs/quality.md says what suits which text"
    web = [source.name for source in corpus.sources if source.domain == "web"]
    if web and dedup.minhash and dedup.minhash.threshold > 0.7:
        yield f"{', '.join(web)}: web pages are copied with more changes; dedup.minhash.threshold: 0.6 is usual"
    if web and not dedup.substring:
        yield f"{', '.join(web)}: passages that pages share stay; dedup.substring: {{}} cuts them"
    code = [source.name for source in corpus.sources if source.domain == "code" and source.dedup.threshold is None]
    if code and dedup.minhash and dedup.minhash.threshold < 0.7:
        yield f"{', '.join(code)}: code of one project is alike without being a copy; give it dedup: {{threshold: 0.85}} of its own"
