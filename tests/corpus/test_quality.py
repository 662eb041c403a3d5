"""Quality classifiers on real text: they separate, their scores are probabilities, and the reported metrics are right."""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmworks.corpus.document import Batch, Context, Document, Drop
from lmworks.corpus.transform.quality import Classifier, grams, measure
from lmworks.corpus.transform.quality_training import labeled, sample, score_texts, train
from lmworks.corpus.transform.steps import make_step
from lmworks.corpus.units import units
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Corpus, Source
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.steps import Quality


def source(**more: object) -> Source:
    return Source.model_validate({"name": "web", "kind": "text", "path": "x", "license": "test", **more})


def documents(texts: Sequence[str]) -> list[Document]:
    return [Document(f"web/0/{number}", text, f"x:{number}", "web", "web", "en") for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def prose() -> list[str]:
    """Stretches of the language reference and of the standard library's docstrings."""
    pieces = [text for topic in sorted(topics) for text in topics[topic].split("\n\n")]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
                pieces.append(text)
    found, held = [], ""
    for piece in pieces:
        held += piece + "\n"
        if len(held) > 500:
            found.append(held)
            held = ""
    return list(dict.fromkeys(found))


def shuffled(texts: Sequence[str], seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.sample(words := text.split(), len(words))) for text in texts]


@pytest.fixture(scope="module")
def classifier(prose: list[str]) -> Classifier:
    return train(prose[::2], shuffled(prose[1::2]), bits=18)


@pytest.mark.parametrize("method", ["logistic", "contrastive"])
def test_it_tells_prose_from_the_same_words_in_any_order(prose: list[str], method: str) -> None:
    with_pairs = train(prose[::2], shuffled(prose[1::2]), method, ngram=2, bits=18).report["held_out"]  # type: ignore[arg-type]
    assert with_pairs["auc_interval"][0] > 0.93
    alone = train(prose[::2], shuffled(prose[1::2]), method, ngram=1, bits=16).report["held_out"]  # type: ignore[arg-type]
    assert alone["auc_interval"][0] < 0.6  # single words cannot know


@pytest.mark.parametrize("method", ["logistic", "contrastive"])
def test_scores_are_probabilities_also_where_labels_are_often_wrong(prose: list[str], method: str) -> None:
    """One label in five is turned round, so that none can be sure: of fresh documents that score 0.7, 7 in 10 must be labeled good."""
    draw = random.Random(3)
    modules = [path.read_text("utf-8", "replace") for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("[a-s]*.py"))[:900]]
    code = [text[start : start + 300] for text in modules for start in range(1000, min(len(text) - 300, 6000), 1000)]
    words = [text[start : start + 300] for text in prose for start in (0, 300)]
    rows = [(text, is_good != (draw.random() < 0.2)) for texts, is_good in ((words, True), (code, False)) for text in texts if text.strip()]
    draw.shuffle(rows)
    good, bad = ([text for text, label in rows[::2] if label == kind] for kind in (True, False))
    made = train(good, bad, method, bits=16)  # type: ignore[arg-type]
    labels = np.array([label for _, label in rows[1::2]])
    scores = score_texts(made, [text for text, _ in rows[1::2]])
    fresh = measure(scores, labels)
    assert fresh["calibration_error"] < 0.05 and 0.65 < fresh["auc"] <= 0.8 + 0.03
    sure = measure(1 / (1 + (1 / np.clip(scores, 0.01, 0.99) - 1) ** 4), labels)  # what too large a scale would do
    assert sure["calibration_error"] > 2 * fresh["calibration_error"]
    assert fresh["log_loss"] < sure["log_loss"]


def test_figures_are_those_of_counting_by_hand() -> None:
    scores = np.array([0.05, 0.15, 0.35, 0.55, 0.65, 0.92, 0.97, 0.45])
    good = np.array([False, False, True, False, True, True, True, True])
    held = measure(scores, good)
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[good] for b in scores[~good]]
    assert held["auc"] == pytest.approx(np.mean(pairs)) == pytest.approx(13 / 15)
    at_half = next(row for row in held["thresholds"] if row["threshold"] == 0.5)
    assert (at_half["kept"], at_half["precision"], at_half["recall"], at_half["bad_kept"]) == (0.5, 0.75, 0.6, 1 / 3)
    assert at_half["precision_interval"] == pytest.approx([0.3006, 0.9544], abs=1e-4)  # Wilson, 3 of 4
    assert held["brier"] == pytest.approx(np.mean((scores - good) ** 2))
    assert held["log_loss"] == pytest.approx(-np.mean(np.log(np.where(good, scores, 1 - scores))))
    assert sum(one["documents"] for one in held["reliability"]) == 8
    by_hand = {0: (1, 0.05), 1: (1, 0.15), 3: (1, 0.65), 4: (1, 0.55), 5: (1, 0.55), 6: (1, 0.35), 9: (2, 0.055)}
    assert held["calibration_error"] == pytest.approx(sum(count * gap for count, gap in by_hand.values()) / 8)


def test_the_interval_of_the_auc_covers_it(prose: list[str]) -> None:
    """Scores drawn so that the true AUC is known: 95 of 100 intervals should hold it."""
    from math import erf

    draw = np.random.default_rng(0)
    good = np.repeat([True, False], [60, 90])
    truth = 0.5 * (1 + erf(1 / 2))  # normals one standard deviation apart
    held = 0
    for _ in range(100):
        raw = draw.normal(size=150) + good
        low, high = measure((raw - raw.min()) / np.ptp(raw), good)["auc_interval"]
        held += low <= truth <= high
    assert held >= 88


def test_an_ngram_never_spans_two_documents() -> None:
    together = list(grams(units(["the quick fox", "", "jumps over"]), 2, 20))
    for n, (buckets, owners) in enumerate(together, start=1):
        alone = [list(grams(units([text]), 2, 20))[n - 1] for text in ("the quick fox", "jumps over")]
        assert buckets.tolist() == [bucket for found, _ in alone for bucket in found.tolist()]
        assert owners.tolist() == [0] * len(alone[0][0]) + [2] * len(alone[1][0])


def test_length_says_nothing_and_company_neither(classifier: Classifier, prose: list[str]) -> None:
    text = prose[7]
    once, thrice = classifier.evidence(units([text])), classifier.evidence(units([" ".join([text] * 50)]))
    assert thrice == pytest.approx(once, abs=0.1 * abs(once[0]))
    assert classifier.scores(units(prose[:20]))[7] == pytest.approx(classifier.scores(units([text]))[0])
    assert classifier.scores(units(["", "?! ...", text]))[:2].tolist() == [0, 0]


def test_the_same_texts_give_the_same_file_and_back(classifier: Classifier, prose: list[str], tmp_path: Path) -> None:
    classifier.save(tmp_path / "a.safetensors")
    again = train(list(reversed(prose[::2])), shuffled(prose[1::2]), bits=18)
    read = Classifier.load(tmp_path / "a.safetensors")
    assert read.fingerprint == classifier.fingerprint and read.report == json.loads(json.dumps(classifier.report))
    assert np.array_equal(read.scores(units(prose[:50])), classifier.scores(units(prose[:50])))
    assert score_texts(again, prose[:50]) == pytest.approx(score_texts(classifier, prose[:50]), abs=0.02)


def test_a_file_that_is_none_or_was_changed_is_refused(classifier: Classifier, tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    with pytest.raises(UserError, match=r"there is no classifier at .*q\.safetensors; make it with: lmworks corpus classifier train"):
        Classifier.load(path)
    path.write_bytes(b"\x80\x04 not safetensors")
    with pytest.raises(UserError, match="is not a safetensors file"):
        Classifier.load(path)
    save_file({"weights": classifier.weights}, path)
    with pytest.raises(UserError, match="is not a quality classifier"):
        Classifier.load(path)
    classifier.save(path)
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(UserError, match="its fingerprint differs"):
        Classifier.load(path)


def test_repeats_and_texts_of_both_kinds_are_left_out(prose: list[str]) -> None:
    good, bad = [f"{number} {text}" for number, text in enumerate(prose[:300])], shuffled(prose[300:600])
    report = train([*good, *good[:7], *bad[:5]], [*bad, bad[6].upper()], "contrastive", bits=14).report
    assert (report["repeats_left_out"], report["in_both_left_out"]) == (8, 5)
    learned = sum(report["learnt_from"].values())
    assert learned / 595 == pytest.approx(0.6, abs=0.08)
    assert learned + report["calibrated_on"] + report["held_out"]["documents"] == 300 + 295
    with pytest.raises(UserError, match="there are only 49 different bad texts; give at least 50 of each kind"):
        train(good, bad[:49])


def test_the_step_scores_drops_and_takes_the_threshold_of_the_source(classifier: Classifier, prose: list[str], tmp_path: Path) -> None:
    classifier.save(tmp_path / "q.safetensors")
    node = Quality(model="q.safetensors", threshold=0.5)
    texts = [*prose[:40], *shuffled(prose[40:80], seed=5), ""]
    scores = score_texts(classifier, texts)
    step = make_step(node, Context(source(), 0, tmp_path))
    assert step.makes == step.statistics == ("quality",) and step.name == "quality"
    outcomes = step(Batch(documents(texts)))
    assert [isinstance(outcome, Drop) for outcome in outcomes] == (scores < 0.5).tolist()
    assert (scores[:40] >= 0.5).sum() > 34 and (scores[40:] < 0.5).sum() > 34
    for outcome, score in zip(outcomes, scores, strict=True):
        assert outcome.facts["quality"] == pytest.approx(score, abs=1e-6)
    drop = next(outcome for outcome in outcomes if isinstance(outcome, Drop))
    assert drop.reason == "quality" and drop.detail.endswith("< 0.5")

    lenient = make_step(node, Context(source(quality_threshold=0), 0, tmp_path))
    assert not any(isinstance(outcome, Drop) for outcome in lenient(Batch(documents(texts))))
    other = make_step(Quality(model="missing", sources=("books",)), Context(source(), 0, tmp_path))
    assert list(other(Batch(documents(texts)))) == documents(texts)


def test_a_sample_is_drawn_from_all_parts_and_is_the_same_each_time(tmp_path: Path) -> None:
    for number in range(5):
        rows = [{"body": f"text {row} of file {number}"} for row in range(200)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\nbroken\n")
    found = sample(str(tmp_path), 100, 1, text_key="body")
    assert len(found) == len(set(found)) == 100 and found == sample(str(tmp_path), 100, 1, text_key="body")
    assert found != sample(str(tmp_path), 100, 2, text_key="body")
    assert {text[-1] for text in found} == set("01234")
    recipe = Recipe(name="r", corpus=Corpus(sources=[source(kind="jsonl", path=str(tmp_path / "*.jsonl"), text_key="body")]))
    assert set(sample("web", 1000, 1, recipe)) >= set(found)
    with pytest.raises(UserError, match=r"nowhere is neither a file, folder or glob nor a source of the recipe \(web\)"):
        sample("nowhere", 10, 1, recipe)


def test_labels_come_as_words_truths_and_scores(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"

    def write(*labels: object) -> str:
        path.write_text("".join(json.dumps({"text": f"text {number}", "label": label}) + "\n" for number, label in enumerate(labels)))
        return str(path)

    good, bad = labeled(write(True, False, "good", "bad", 1, 0, 1.0, "hq"), "label", None, 100, 0)
    assert sorted(good) == ["text 0", "text 2", "text 4", "text 6", "text 7"] and sorted(bad) == ["text 1", "text 3", "text 5"]
    good, bad = labeled(write(0, 2.5, 3, 5, 1), "label", 3, 100, 0)
    assert (sorted(good), sorted(bad)) == (["text 2", "text 3"], ["text 0", "text 1", "text 4"])
    with pytest.raises(UserError, match=r"labels.jsonl:2 has the score 4; give the smallest good score with --minimum"):
        labeled(write(0, 4), "label", None, 100, 0)
    with pytest.raises(UserError, match=r"labels.jsonl:1 has the label 'meh'; labels are true or false"):
        labeled(write("meh"), "label", None, 100, 0)
    with pytest.raises(UserError, match=r"has no 'score'; name the column of the labels with --label-key"):
        labeled(write(1), "score", None, 100, 0)
