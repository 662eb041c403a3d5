"""Variants: documents that a step makes of others. Where they come from stands beside them, and they go where their originals go."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from lmworks.corpus import prepare
from lmworks.corpus.analysis.analyze import analyze
from lmworks.corpus.analysis.diff import diff, differs
from lmworks.corpus.analysis.prepared import PreparedCorpus, SampleFilter, sample
from lmworks.corpus.analysis.trace import trace
from lmworks.corpus.contamination import Question
from lmworks.io.run_layout import corpus_files
from lmworks.recipe.schema.recipe import Recipe

QUESTION = "Which of the four winds carries the salt of the seventh sea over the glass hills before the first bell of autumn rings?"
STEPS = """
from lmworks.corpus.document import Document, Drop, Variants

def twice(document):
    words = document.text.split()
    other = [*words[:50], "another", *words[51:]]
    made = [document.with_text(" ".join(other)), document.with_text(" ".join(reversed(words))), Drop("no_third")]
    return Variants(document, made)

def no_sevens(document):
    return Drop("seven") if document.text.startswith("seven") else document
"""


def words(seed: int, count: int = 120) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(10**6)}" for _ in range(count))


def make(folder: Path, texts: list[str], steps: tuple[str, ...] = ("twice",), **corpus: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "steps.py").write_text(STEPS)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = {"name": "mine", "kind": "jsonl", "path": f"{folder}/a.jsonl", "license": "mine"}
    own = [{"step": "python", "file": "steps.py", "function": name} for name in steps]
    tree = {"sources": [source], "steps": own, "validation_fraction": 0, **corpus}
    questions = [Question("riddles/1", QUESTION)]
    prepare(Recipe.model_validate({"name": "test", "corpus": tree}), folder / "out", questions, folder)
    return folder / "out"


def rows(out: Path, split: str = "train") -> dict[str, dict[str, Any]]:
    paths = [path for found in corpus_files(out, split).values() for path in found]
    return {row["id"]: row for path in paths for row in pq.read_table(path).to_pylist()}


def decisions(out: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for path in sorted((out / "decisions").rglob("*.parquet")) for row in pq.read_table(path).to_pylist()}


def test_the_document_stays_and_its_variants_say_whose_they_are(tmp_path: Path) -> None:
    out = make(tmp_path, [words(0), words(1)])
    found = rows(out)
    assert list(found) == ["mine/0/0", "mine/0/0.1", "mine/0/0.2", "mine/0/1", "mine/0/1.1", "mine/0/1.2"]
    assert found["mine/0/1"]["text"] == words(1) and json.loads(found["mine/0/1"]["facts"]) == {}
    assert json.loads(found["mine/0/1.2"]["facts"]) == {"variant_of": "mine/0/1", "variant_by": "twice"}
    assert found["mine/0/1.2"]["text"].split() == words(1).split()[::-1] and found["mine/0/1.2"]["origin"] == found["mine/0/1"]["origin"]
    made = decisions(out)
    assert [made[name]["variant_of"] for name in ("mine/0/1", "mine/0/1.1", "mine/0/1.3")] == ["", "mine/0/1", "mine/0/1"]
    assert (made["mine/0/1.3"]["fate"], made["mine/0/1.3"]["reason"]) == ("twice", "no_third")
    report = json.loads((out / "report.json").read_text())["sources"][0]
    step = report["steps"][0]
    assert (step["came"]["documents"], step["added"]["documents"], step["left"]["documents"]) == (2, 6, 6)
    assert step["left"]["bytes"] == report["train"]["bytes"] == sum(len(row["text"]) for row in found.values())


def test_near_copies_of_their_originals_go_when_asked(tmp_path: Path) -> None:
    texts = [words(0), words(0).replace(words(0).split()[70], "changed"), words(1)]
    assert list(rows(make(tmp_path / "a", texts))) == ["mine/0/0", "mine/0/0.1", "mine/0/0.2", "mine/0/2", "mine/0/2.1", "mine/0/2.2"]
    out = make(tmp_path / "b", texts, dedup={"variants": True})
    assert list(rows(out)) == ["mine/0/0", "mine/0/0.2", "mine/0/2", "mine/0/2.2"]
    made = decisions(make(tmp_path / "a", texts))
    assert [made[f"mine/0/1{end}"]["reason"] for end in ("", ".1", ".2")] == ["near_duplicate"] * 3, "a variant goes with its original"


@pytest.mark.parametrize("dedup", [{"substring": {"min_words": 50}}, {"semantic": {"threshold": 0.9}}])
def test_other_comparisons_leave_variants_alone_unless_asked(tmp_path: Path, dedup: dict[str, Any]) -> None:
    out = make(tmp_path / "a", [words(0), words(1)], dedup=dedup)
    assert len(rows(out)) == 6 and rows(out)["mine/0/0.1"]["text"].count(" ") == 119
    asked = make(tmp_path / "b", [words(0), words(1)], dedup={**dedup, "minhash": None, "variants": True})
    changed = {name: row["text"] for name, row in rows(asked).items()} != {name: row["text"] for name, row in rows(out).items()}
    assert changed


def test_variants_of_held_out_and_leaking_documents_are_not_trained_on(tmp_path: Path) -> None:
    texts = [*(words(number) for number in range(20)), f"{words(50, 80)} {QUESTION}"]
    out = make(tmp_path, texts, validation_fraction=0.2)
    held, train, made = rows(out, "validation"), rows(out), decisions(out)
    assert held and not any("." in name for name in held)
    for name in held:
        assert not {f"{name}.1", f"{name}.2"} & set(train)
        assert (made[f"{name}.1"]["reason"], made[f"{name}.1"]["copy_of"]) == ("held_out_original", name)
    if "mine/0/20" not in held:
        assert [made[f"mine/0/20{end}"]["reason"] for end in ("", ".1", ".2")] == ["contaminated"] * 3
        assert made["mine/0/20.2"]["detail"] == "as its original: riddles/1"
    assert len(train) == 3 * (20 - len(held)) or "mine/0/20" in held


def test_a_variant_goes_with_an_original_that_a_later_step_drops(tmp_path: Path) -> None:
    out = make(tmp_path, [f"seven {words(0)}", words(1)], steps=("twice", "no_sevens"))
    assert list(rows(out)) == ["mine/0/1", "mine/0/1.1", "mine/0/1.2"]
    made = decisions(out)
    assert [(made[f"mine/0/0{end}"]["reason"], made[f"mine/0/0{end}"]["detail"]) for end in ("", ".2")] == [
        ("seven", ""), ("seven", "as its original"),
    ]  # fmt: skip
    corpus = PreparedCorpus(out)
    for name in made:
        found = trace(corpus, name)
        assert found.agrees, name
    moments = trace(corpus, "mine/0/1.2").moments
    assert [moment.stage for moment in moments[:3]] == ["read", "twice", "no_sevens"]
    assert moments[1].outcome.startswith("variant mine/0/1.2 made of it") and moments[1].facts["variant_of"] == "mine/0/1"
    assert [one.text.split()[0] for one in sample(corpus, SampleFilter(fate="train"), 10)] == [
        row["text"].split()[0] for row in rows(out).values()
    ]


def test_variants_of_two_steps_are_numbered_on_and_looked_at_like_others(tmp_path: Path) -> None:
    out = make(tmp_path / "a", [words(0), words(1)], steps=("twice", "twice"), dedup={"exact": False, "minhash": None})
    assert list(rows(out)) == [f"mine/0/{number}{end}" for number in (0, 1) for end in ("", ".1", ".2", ".4", ".5")]
    assert all(trace(PreparedCorpus(out), name).agrees for name in decisions(out))
    whole = analyze(out, None, 1, 1)["whole"]
    assert whole["read"]["documents"] == 2 and whole["train"]["documents"] == 10
    other = make(tmp_path / "b", [words(0), words(1)], dedup={"exact": False, "minhash": None})
    assert differs(diff(PreparedCorpus(out), PreparedCorpus(other))) and not differs(diff(PreparedCorpus(out), PreparedCorpus(out)))
