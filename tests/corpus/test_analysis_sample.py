"""Samples: what is asked for and nothing else, the same for the same seed, each document as likely as another, texts as they were."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import analysis_corpus as made
import pytest

from lmworks.corpus.analysis.prepared import PreparedCorpus, SampleFilter, sample
from lmworks.corpus.transform.cleaning import clean
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Bucket

ALL = 10_000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    return made.make(tmp_path_factory.mktemp("evidence"))


@pytest.mark.parametrize(
    "choice",
    [
        SampleFilter(),
        SampleFilter(source="code"),
        SampleFilter(fate="validation"),
        SampleFilter(fate="quarantine"),
        SampleFilter(fate="dedup", reason="near_duplicate"),
        SampleFilter(source="pages", reason="mean_word_length"),
    ],
    ids=str,
)
def test_all_that_is_asked_for_and_nothing_else(corpus: PreparedCorpus, choice: SampleFilter) -> None:
    rows = made.decisions(corpus).values()
    wanted = {
        row["id"]
        for row in rows
        if choice.source in (None, row["id"].split("/")[0])
        and choice.fate in (None, row["fate"])
        and choice.reason in (None, row["reason"])
    }
    drawn = sample(corpus, choice, ALL)
    assert wanted
    assert {one.decision["id"] for one in drawn} == wanted and len(drawn) == len(wanted)


def test_texts_are_those_of_the_corpus_and_of_the_source(corpus: PreparedCorpus) -> None:
    raw = made.rows()
    kept = {**made.kept(corpus), **made.kept(corpus, "validation")}
    drawn = sample(corpus, SampleFilter(source="pages"), ALL)
    for one, text in zip(drawn, raw, strict=False):  # in the order of the file
        if one.output:
            assert one.text == kept[one.decision["id"]] and one.output.split("/")[0] == one.decision["fate"]
        else:
            assert one.text == text
    assert sum(one.output is not None for one in sample(corpus, SampleFilter(), ALL)) == len(kept)


def test_the_same_seed_draws_the_same(corpus: PreparedCorpus) -> None:
    one, again, other = (
        [drawn.decision["id"] for drawn in sample(corpus, SampleFilter(), 8, seed)] for seed in (1, 1, 2)
    )
    assert one == again != other
    assert set(one) < {drawn.decision["id"] for drawn in sample(corpus, SampleFilter(), 16, 1)}, "more of them are the same and others"


def test_every_document_is_as_likely(corpus: PreparedCorpus) -> None:
    drawn = Counter(one.decision["id"] for seed in range(300) for one in sample(corpus, SampleFilter(source="code"), 2, seed))
    count = len(sample(corpus, SampleFilter(source="code"), ALL))
    assert len(drawn) == count
    expected = 600 / count
    chi = sum((seen - expected) ** 2 / expected for seen in drawn.values())
    assert chi < count - 1 + 5 * (2 * (count - 1)) ** 0.5


def test_buckets(tmp_path: Path) -> None:
    pages = [clean(page) for page in made.pages(30)]
    rows = [json.dumps({"text": page, "score": place / 30}) for place, page in enumerate(pages)]
    (tmp_path / "scored.jsonl").write_text("\n".join(rows))
    buckets = [Bucket(name="high", minimum=0.5), Bucket(name="low", minimum=0.0)]
    more = {"fact_keys": ("score",), "bucket_by": "score", "buckets": buckets}
    source = made.source(tmp_path / "scored.jsonl", "scored").model_copy(update=more)
    corpus = made.make(tmp_path, sources=[source], steps=[{"step": "clean"}])
    for name, good in (("high", True), ("low", False)):
        drawn = sample(corpus, SampleFilter(bucket=name), ALL)
        assert drawn and all((pages.index(one.text) >= 15) is good for one in drawn)
        assert {one.output for one in sample(corpus, SampleFilter(bucket=name, fate="train"), ALL)} == {f"train/scored.{name}"}
    for choice, told in (
        (SampleFilter(bucket="middle"), "it has: bucket high, bucket low"),
        (SampleFilter(bucket="high", reason="duplicate"), "leave out the reason"),
        (SampleFilter(bucket="high", fate="rules"), "leave out the fate rules"),
    ):
        with pytest.raises(UserError, match=told):
            sample(corpus, choice)


def test_what_there_is_none_of_is_told_with_what_there_is(corpus: PreparedCorpus) -> None:
    with pytest.raises(UserError, match=r"no document with reason too_green; it has: .*rules mean_word_length"):
        sample(corpus, SampleFilter(reason="too_green"))
    with pytest.raises(UserError, match="no source 'books'; it has: pages, code"):
        sample(corpus, SampleFilter(source="books"))


def test_a_source_that_has_changed_is_told(tmp_path: Path) -> None:
    corpus = made.make(tmp_path)
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(["", *rows]))
    assert sample(corpus, SampleFilter(fate="train"), 3), "what was kept is still there"
    with pytest.raises(UserError, match="source pages has changed"):
        sample(corpus, SampleFilter(fate="rules"), 3)
