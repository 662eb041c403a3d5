"""A mixture over a source with quality buckets, down to how often each token is read."""

from __future__ import annotations

import pytest

from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Bucket, Corpus, Source
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.order import Order

TOKENS = {"web.high": 40_000, "web.middle": 160_000, "web.low": 500_000, "books": 100_000}


def recipe(mixture: dict[str, float], optional: bool = False) -> Recipe:
    buckets = [Bucket(name="high", minimum=0.7, weight=3), Bucket(name="middle", minimum=0.3), Bucket(name="low", minimum=0, weight=0)]
    common = {"kind": "text", "path": "unused", "license": "test"}
    sources = [Source.model_validate({"name": "web", "buckets": buckets, "optional": optional, **common})]
    sources.append(Source.model_validate({"name": "books", **common}))
    phase = {"name": "one", "tokens": "128Ki", "mixture": mixture, "sequence_length": "64 tokens", "global_batch_tokens": "1Ki"}
    return Recipe.model_validate({"name": "r", "corpus": Corpus(sources=sources), "train": {"phases": [phase]}})


def test_a_token_is_read_as_often_as_its_bucket_weighs() -> None:
    shares = {share.source: share for share in Order(recipe({"web": 0.8, "books": 0.2}), TOKENS).shares()}
    assert set(shares) == {"web.high", "web.middle", "books"}
    assert shares["web.high"].epochs == pytest.approx(3 * shares["web.middle"].epochs, rel=0.02)
    planned = {name: share.planned for name, share in shares.items()}
    assert planned["web.high"] + planned["web.middle"] == pytest.approx(4 * planned["books"], rel=0.01)


def test_a_bucket_may_be_read_on_its_own() -> None:
    shares = {share.source: share.planned for share in Order(recipe({"web.low": 0.5, "books": 0.5}), TOKENS).shares()}
    assert set(shares) == {"web.low", "books"} and shares["web.low"] == pytest.approx(shares["books"], rel=0.01)


def test_an_optional_source_that_could_not_be_had_is_left_out_with_its_buckets() -> None:
    order = Order(recipe({"web": 0.5, "web.low": 0.2, "books": 0.3}, optional=True), {"books": 100_000})
    assert order.left_out == ["web", "web.low"] and {share.source for share in order.shares()} == {"books"}
    with pytest.raises(UserError, match=r"the mixture names source web, which has no tokens; available: books"):
        Order(recipe({"web": 0.5, "books": 0.5}), {"books": 100_000})
