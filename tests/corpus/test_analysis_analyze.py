"""The figures of a corpus: they add up with the report, are the same for any number of processes, and show what was planted."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import analysis_corpus as made
import numpy as np
import pytest

from lmworks.corpus.analysis import analyze as analyzing
from lmworks.corpus.analysis.analyze import analyze
from lmworks.corpus.analysis.perplexity import MAX_CONTEXT, MIN_PROBABILITY, SCORED_BYTES, ReferenceModel
from lmworks.corpus.analysis.prepared import PreparedCorpus
from lmworks.corpus.histogram import Histogram
from lmworks.errors import UserError

CHARACTERS: Any = functools.partial(map, len)
ALL = 1000  # parts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    return made.make(tmp_path_factory.mktemp("evidence"))


@pytest.fixture(scope="module")
def found(corpus: PreparedCorpus) -> dict[str, Any]:
    return analyze(corpus.out, CHARACTERS, ALL)


def test_what_was_read_is_what_was_kept_and_dropped(corpus: PreparedCorpus, found: dict[str, Any]) -> None:
    rows = made.decisions(corpus)
    assert len(corpus.pieces) > 3
    for source, report in zip(found["sources"], corpus.report["sources"], strict=True):
        broken = [one for one in source["dropped"] if one["step"] == "quarantine"]
        lost = sum(one["documents"] for one in source["dropped"])
        assert source["read"]["documents"] + sum(one["documents"] for one in broken) == report["came"]["documents"]
        assert source["train"]["documents"] + source["validation"]["documents"] + lost == report["came"]["documents"]
        assert (source["train"]["bytes"], source["validation"]["bytes"]) == (report["train"]["bytes"], report["validation"]["bytes"])
        assert source["read"]["lengths"]["count"] == source["read"]["documents"]
        assert sum(one["documents"] for one in source["read"]["languages"].values()) == source["read"]["documents"]
    whole = found["whole"]
    for what in ("read", "train"):
        assert whole[what]["documents"] == sum(one[what]["documents"] for one in found["sources"])
        assert whole[what]["documents"] == sum(one[what]["documents"] for one in found["domains"].values())
    reasons = {(row["fate"], row["reason"]) for row in rows.values() if row["fate"] not in ("train", "validation")}
    assert {(one["step"], one["reason"]) for one in whole["dropped"]} == reasons


def test_texts_are_counted_as_they_are(corpus: PreparedCorpus, found: dict[str, Any]) -> None:
    texts = made.kept(corpus)
    train = found["whole"]["train"]
    assert train["tokens"] == sum(map(len, texts.values())), "with all parts looked at, nothing is scaled"
    assert train["measured"] == {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts.values())}
    sound = [row for row in made.decisions(corpus).values() if row["fate"] != "quarantine"]
    assert found["whole"]["read"]["measured"] == {"documents": len(sound), "bytes": sum(row["bytes"] for row in sound)}


def test_held_out_documents_do_not_measure_themselves(corpus: PreparedCorpus, found: dict[str, Any]) -> None:
    whole = found["whole"]
    assert whole["read"]["perplexity"]["count"] == whole["read"]["documents"] - whole["validation"]["documents"]


def test_some_parts_stand_for_all(corpus: PreparedCorpus, found: dict[str, Any]) -> None:
    some = analyze(corpus.out, CHARACTERS, 2)
    measured = some["whole"]["train"]["measured"]["documents"]
    assert 0 < measured < found["whole"]["train"]["measured"]["documents"]
    assert some["whole"]["train"]["documents"] == found["whole"]["train"]["documents"]
    assert some["whole"]["train"]["tokens"] == pytest.approx(found["whole"]["train"]["tokens"], rel=0.05)


def test_noise_is_surprising_and_copies_of_held_out_text_are_not(found: dict[str, Any]) -> None:
    by_reason = {(one["step"], one["reason"]): one for one in found["whole"]["dropped"]}
    train = found["whole"]["train"]["perplexity"]["quantiles"]["50%"]
    noise = [one["median_perplexity"] for (step, _), one in by_reason.items() if step == "rules"]
    assert max(noise) > 20 * train
    assert by_reason["decontaminate", "contaminated"]["median_perplexity"] < 5 * train


def test_planted_copies_are_found(corpus: PreparedCorpus, found: dict[str, Any]) -> None:
    first = found["copied"]["most"][0]
    everything = {**made.kept(corpus), **made.kept(corpus, "validation")}
    assert everything[first["id"]] == made.pages(40)[made.COPIED]
    assert first["copies"] == 2, "the third copy had lost most of its lines, and was dropped for that"
    assert sum(int(size) * count for size, count in found["copied"]["copies"].items()) == sum(
        one["documents"] for one in found["whole"]["duplicates"].values()
    )


def test_processes_change_nothing(corpus: PreparedCorpus, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyzing, "_MIN_BYTES_PER_PROCESS", 1)
    assert analyze(corpus.out, CHARACTERS, ALL, processes=2) == found


def test_a_source_that_is_gone_leaves_what_was_kept(tmp_path: Path) -> None:
    corpus = made.make(tmp_path, made.pages(20))
    whole = analyze(corpus.out, CHARACTERS, ALL)["whole"]
    (tmp_path / "rows.jsonl").unlink()
    found = analyze(corpus.out, CHARACTERS, ALL)
    assert "no longer exists" in found["unread"]["pages"]
    assert found["whole"]["train"] == whole["train"]
    pages = found["sources"][0]
    assert pages["read"]["tokens"] is None and pages["read"]["documents"] == 20


def test_a_source_that_has_changed_is_not_mixed_with_what_was_decided(tmp_path: Path) -> None:
    corpus = made.make(tmp_path, made.pages(20), part_bytes="10MB")
    text = (tmp_path / "rows.jsonl").read_text().splitlines()
    for changed in (["{broken", *text[1:]], text[:-1], [*text, text[-1]]):
        (tmp_path / "rows.jsonl").write_text("\n".join(changed))
        found = analyze(corpus.out, CHARACTERS, ALL)
        assert "has changed" in found["unread"]["pages"]
        pages = found["sources"][0]
        assert pages["read"]["tokens"] is None and all(one["median_perplexity"] is None for one in pages["dropped"])


def test_no_corpus_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lmworks corpus prepare RECIPE"):
        analyze(tmp_path)


def test_perplexity_knows_its_own_kind() -> None:
    pages = made.pages(90)
    model = ReferenceModel(pages[:45])
    rng = random.Random(5)
    shuffled = ["".join(rng.sample(page, len(page))) for page in pages[45:]]
    own, new, noise = (float(np.median(model.perplexity(texts))) for texts in (pages[:45], pages[45:], shuffled))
    assert 1 < own < new < 8 < 50 < noise
    assert model.perplexity(pages[45:50]).tolist() == pytest.approx([float(model.perplexity([page])[0]) for page in pages[45:50]])


def test_perplexity_equals_its_plain_twin() -> None:
    pages = made.pages(8)
    model, twin = ReferenceModel(pages[:6]), DictionaryModel(pages[:6])
    for text in (*pages[6:], "aaaa", "zqj", pages[0][:100]):
        assert float(model.perplexity([text])[0]) == pytest.approx(twin.perplexity(text[:SCORED_BYTES]), rel=0.02)


class DictionaryModel:
    """The same model in dictionaries: n-grams interpolated by method C of Witten and Bell, without hashing."""

    def __init__(self, texts: list[str]) -> None:
        self.counts: dict[bytes, Counter[int]] = {}
        for text in texts:
            for context, byte in self.pairs(text):
                for length in range(MAX_CONTEXT + 1):
                    self.counts.setdefault(context[MAX_CONTEXT - length :], Counter())[byte] += 1

    @staticmethod
    def pairs(text: str) -> list[tuple[bytes, int]]:
        data = b"\0" * MAX_CONTEXT + text.encode()
        return [(data[place - MAX_CONTEXT : place], data[place]) for place in range(MAX_CONTEXT, len(data))]

    def perplexity(self, text: str) -> float:
        bits = 0.0
        pairs = self.pairs(text)
        for context, byte in pairs:
            chance = 1 / 256
            for length in range(MAX_CONTEXT + 1):
                if seen := self.counts.get(context[MAX_CONTEXT - length :]):
                    chance = (seen[byte] + len(seen) * chance) / (seen.total() + len(seen))
            bits -= math.log2(chance + MIN_PROBABILITY)
        return float(2 ** (bits / len(pairs)))


def test_perplexity_of_odd_texts() -> None:
    model = ReferenceModel(["only this", ""])
    assert np.isnan(model.perplexity([""])[0])
    assert model.perplexity([]).shape == (0,)
    odd = model.perplexity(["\0\0\0", "a", "𝔘" * 9000, "é" * SCORED_BYTES, "only this"])
    assert np.isfinite(odd).all() and (odd >= 1).all()
    assert odd[-1] == odd.min()
    assert np.isfinite(ReferenceModel([]).perplexity(["anything"])).all()


def test_only_the_head_of_a_text_is_looked_at() -> None:
    model = ReferenceModel(made.pages(5))
    page = made.pages(1)[0].ljust(SCORED_BYTES, "x")[:SCORED_BYTES]
    assert model.perplexity([page]) == model.perplexity([page + "𝔘ß" * 999])


def test_histograms_in_the_figures_can_be_added_again(found: dict[str, Any]) -> None:
    lengths = Histogram()
    for source in found["sources"]:
        lengths.merge(Histogram.from_json(source["read"]["lengths"]))
    assert lengths.as_json() == found["whole"]["read"]["lengths"]
