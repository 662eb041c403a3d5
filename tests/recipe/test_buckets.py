"""Quality buckets in a recipe: what may be written, and what a mixture over them means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lmworks.errors import UserError
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.corpus import Bucket, Source, expand_buckets

Write = Callable[..., Path]
STEPS = "corpus:\n  steps: [{step: clean}, {step: quality, model: q.safetensors}]\n"
BUCKETS = "buckets: [{name: high, minimum: 0.7, weight: 3}, {name: low, minimum: 0}]"


def source(name: str, **weights: float) -> Source:
    buckets = [Bucket(name=bucket, minimum=number / 10, weight=weight) for number, (bucket, weight) in enumerate(weights.items())]
    return Source(name=name, kind="text", path="x", license="test", buckets=buckets)


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    return str(caught.value)


def bucketed(write: Write, more: str = BUCKETS, mixture: str = "{prose: 0.75, code: 0.25}") -> Path:
    return write(
        ("corpus:\n", STEPS), ("domain: prose,", f"domain: prose, {more},"), ("{prose: 0.75, code: 0.25}", mixture)
    )


def test_a_token_of_a_heavier_bucket_is_read_as_many_times_as_often() -> None:
    web = source("web", low=0, middle=1, high=3)
    amounts = {"web.low": 900, "web.middle": 600, "web.high": 200, "books": 50}
    found = expand_buckets({"web": 0.8, "books": 0.2}, [web, source("books")], amounts)
    assert found == pytest.approx({"web.middle": 0.4, "web.high": 0.4, "books": 0.2})
    assert found["web.high"] / amounts["web.high"] == pytest.approx(3 * found["web.middle"] / amounts["web.middle"])


def test_a_bucket_may_be_named_beside_its_source_and_even_at_weight_0() -> None:
    web = source("web", low=0, middle=1, high=1)
    found = expand_buckets({"web": 0.5, "web.high": 0.3, "web.low": 0.2}, [web], {"web.low": 1, "web.middle": 10, "web.high": 30})
    assert found == pytest.approx({"web.middle": 0.125, "web.high": 0.675, "web.low": 0.2})


def test_buckets_without_text_give_way_and_a_source_without_any_is_left_for_the_caller() -> None:
    web = source("web", low=1, high=1)
    assert expand_buckets({"web": 1.0}, [web], {"web.low": 7}) == {"web.low": 1.0}
    assert expand_buckets({"web": 1.0}, [web], {}) == {"web": 1.0}


def test_mixtures_may_name_sources_and_their_buckets(write: Write) -> None:
    resolved = load_recipe(bucketed(write, mixture="{prose: 0.5, prose.high: 0.25, code: 0.25}"))
    assert resolved.recipe.corpus.sources[0].outputs == ("prose.high", "prose.low")
    assert resolved.recipe.corpus.sources[1].outputs == ("code",)
    assert load_recipe(bucketed(write), ["corpus.sources.prose.buckets.high.weight=5"]).recipe.corpus.sources[0].buckets[0].weight == 5
    message = refusal(bucketed(write, mixture="{prose.hihg: 0.75, code: 0.25}"))
    assert message.endswith("no source is called 'prose.hihg'; did you mean 'prose.high'?")


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ("buckets: [{name: a, minimum: 0.2}]", "no bucket holds what is below 0.2"),
        ("buckets: [{name: a, minimum: 0}, {name: a, minimum: 1}]", "two buckets share a name or a minimum"),
        ("buckets: [{name: a, minimum: 0}, {name: b, minimum: 0}]", "two buckets share a name or a minimum"),
        ("buckets: [{name: a, minimum: 0, weight: 0}]", "all buckets have weight 0"),
        ("buckets: [{name: a.b, minimum: 0}]", "buckets.a.b.name"),
    ],
)
def test_buckets_that_make_no_sense_are_refused(write: Write, buckets: str, message: str) -> None:
    assert message in refusal(bucketed(write, buckets))


def test_buckets_need_a_step_that_measures(write: Write) -> None:
    message = refusal(write(("domain: prose,", f"domain: prose, {BUCKETS},")))
    assert "corpus.sources.prose.buckets: buckets need the documents' quality; add {step: quality, model: FILE}" in message
    assert "no source is called 'prse'; did you mean 'prose'" in refusal(
        write(("corpus:\n", STEPS.replace("q.safetensors", "q.safetensors, sources: [prse]")))
    )
