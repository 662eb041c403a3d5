"""From quality to sampling: scores, a threshold, buckets as outputs of the corpus, and a mixture that draws from them by weight."""

from __future__ import annotations

import json
import random
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow.parquet as pq
import pytest

from lmworks.corpus import prepare
from lmworks.corpus.document import Document
from lmworks.corpus.transform.quality import bucket_of
from lmworks.corpus.transform.quality_training import train
from lmworks.errors import UserError
from lmworks.io.run_layout import corpus_files
from lmworks.recipe.schema.corpus import Bucket, Corpus, Source
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.steps import Clean, Python, Quality
from lmworks.tokenizer.evaluate import source_weights

BUCKETS = [Bucket(name="low", minimum=0, weight=0), Bucket(name="high", minimum=0.7, weight=3), Bucket(name="middle", minimum=0.3)]


def texts() -> tuple[list[str], list[str]]:
    """Paragraphs of the language reference, and others with their words in any order."""
    draw = random.Random(0)
    found = sorted({text for topic in topics.values() for text in topic.split("\n\n") if len(text.split()) > 30})
    draw.shuffle(found)
    half = len(found) // 2
    return found[:half], [" ".join(draw.sample(words := text.split(), len(words))) for text in found[half:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier and a file of good and bad texts."""
    made = tmp_path_factory.mktemp("web")
    good, bad = texts()
    train(good, bad, "contrastive", bits=16).save(made / "quality.safetensors")
    rows = [{"text": f"{text} {number}"} for number, text in enumerate([*good[:150], *bad[:150]])]
    (made / "web.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def recipe(folder: Path, threshold: float | None = None, **source: object) -> Recipe:
    web = Source.model_validate({
        "name": "web", "kind": "jsonl", "path": str(folder / "web.jsonl"), "license": "test", "buckets": BUCKETS,
        "quality_threshold": threshold, **source,
    })  # fmt: skip
    steps = [Clean(), Quality(model=str(folder / "quality.safetensors"), threshold=0.0)]
    phase = {"name": "one", "tokens": "1M", "mixture": {"web": 1.0}, "sequence_length": "512 tokens", "global_batch_tokens": "8Ki"}
    corpus = Corpus(sources=[web], steps=steps, validation_fraction=0.1, processes=1)
    return Recipe.model_validate({"name": "r", "corpus": corpus, "train": {"phases": [phase]}})


def test_the_bucket_is_the_one_with_the_highest_minimum_that_is_reached() -> None:
    source = Source(name="web", kind="text", path="x", license="test", buckets=BUCKETS)
    document = Document("web/0/0", "x", "x:0", "web", "web", "en")
    found = [bucket_of(document.with_facts(quality=value), source) for value in (0.0, 0.2999, 0.3, 0.69, 0.7, 1.0)]
    assert found == ["low", "low", "middle", "middle", "high", "high"]
    assert bucket_of(document, Source(name="web", kind="text", path="x", license="test")) is None


def test_documents_go_to_the_outputs_of_their_buckets(folder: Path, tmp_path: Path) -> None:
    prepare(recipe(folder, threshold=0.1), tmp_path / "corpus")
    outputs = corpus_files(tmp_path / "corpus", "train")
    assert set(outputs) == {"web.high", "web.middle", "web.low"}
    spans = {"web.low": (0.1, 0.3), "web.middle": (0.3, 0.7), "web.high": (0.7, 1.0)}
    for output, paths in outputs.items():
        scores = [json.loads(facts)["quality"] for path in paths for facts in pq.read_table(path)["facts"].to_pylist()]
        assert scores and all(spans[output][0] <= score <= spans[output][1] for score in scores)
    decisions = pq.read_table(tmp_path / "corpus" / "decisions" / "web")
    dropped = [row for row in decisions.to_pylist() if row["fate"] == "quality"]
    assert len(dropped) > 50 and all(row["quality"] < 0.1 and row["detail"].endswith("< 0.1") for row in dropped)
    weights = source_weights(recipe(folder), tmp_path / "corpus")
    sizes = {output: sum(path.stat().st_size for path in paths) for output, paths in outputs.items()}
    assert set(weights) == {"web.high", "web.middle"}
    assert weights["web.high"] / sizes["web.high"] == pytest.approx(3 * weights["web.middle"] / sizes["web.middle"])


def test_another_weight_leaves_the_corpus_and_another_classifier_does_not(folder: Path, tmp_path: Path) -> None:
    def times(name: str) -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in (tmp_path / "corpus").glob(f"{name}/**/*.parquet")}

    prepare(recipe(folder), tmp_path / "corpus")
    before = times("staging/read")
    heavier = [bucket.model_copy(update={"weight": 7.0}) for bucket in BUCKETS]
    prepare(recipe(folder, buckets=heavier), tmp_path / "corpus")
    assert before and times("staging/read") == before
    good, bad = texts()
    train(bad, good, "contrastive", bits=16).save(folder / "other.safetensors")
    (folder / "quality.safetensors").write_bytes((folder / "other.safetensors").read_bytes())
    prepare(recipe(folder), tmp_path / "corpus")
    assert times("staging/read") != before


def test_buckets_by_what_nobody_measures_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="source web has buckets by the fact 'beauty', which neither the source nor a step provides"):
        prepare(recipe(folder, bucket_by="beauty"), tmp_path / "corpus")
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from lmworks.corpus.document import step\n\n@step(makes=['beauty'], statistics=['beauty'])\n"
        "def beauty(document):\n    return document.with_facts(beauty=len(document.text) % 10 / 10)\n"
    )
    with_step = recipe(folder, bucket_by="beauty")
    steps = [*with_step.corpus.steps, Python(file=str(mine), function="beauty")]
    with_step = with_step.model_copy(update={"corpus": with_step.corpus.model_copy(update={"steps": steps})})
    prepare(with_step, tmp_path / "corpus")
    assert set(corpus_files(tmp_path / "corpus", "train")) == {"web.high", "web.middle", "web.low"}
