"""The document of a comparison, from records of evaluations."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmworks.errors import UserError
from lmworks.evaluate.comparison import OVERALL, compare, failures
from lmworks.evaluate.results import Answers, Document, Outcome, Results, read_results
from lmworks.evaluate.tables import failure_tables, printable_comparison
from lmworks.ui.terminal import Terminal

SCORE = "sums/cloze/0-shot"


def outcomes(right: str, **more: Any) -> dict[str, Outcome]:
    """One item per character: `+` is correct."""
    return {str(i): Outcome(str(i), float(c == "+"), failure=None if c == "+" else "wrong", **more) for i, c in enumerate(right)}


def results(name: str, scores: dict[str, dict[str, Outcome]], **more: Any) -> Results:
    made = {
        score: Answers(score, score.split("/")[0], len(items), sum(one.mark for one in items.values()) / len(items), items)
        for score, items in scores.items()
    }
    return Results(name, f"/{name}", made, **more)


def text(renderable: Any) -> str:
    terminal = Terminal(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PLW1514
    terminal.print(renderable)
    return terminal.export_text()


def test_lost_and_gained_items_with_their_questions() -> None:
    questions = {("sums", str(i)): (f"What is {i} + 1?", str(i + 1)) for i in range(12)}
    a = results("a", {SCORE: outcomes("++++++++++--")}, questions=questions)
    b = results("b", {SCORE: outcomes("-------+++-+", answer="seven")}, questions=questions)
    document = compare([a, b], examples=1)
    row = document["comparisons"][0]["scores"][0]
    assert (row["lost"], row["gained"], row["n"]) == (7, 1, 12)
    assert row["lost_ids"] == [str(i) for i in range(7)] and row["gained_ids"] == ["11"]
    assert row["p"] == pytest.approx(2 * (1 + 8) / 2**8)  # McNemar: 1 of 8 changes is for the better
    assert row["difference"] == pytest.approx(-0.5)
    example = row["examples"]["lost"][0]
    assert (example["question"], example["right"], example["a"], example["b"]) == ("What is 0 + 1?", "1", "(right)", "seven")
    shown = text(printable_comparison(document))
    assert "forgotten: sums/cloze/0-shot 0" in shown and "What is 0 + 1?" in shown and "b: seven" in shown
    assert "learned: sums/cloze/0-shot 11" in shown


def test_only_equal_formulations_are_compared() -> None:
    one, both = outcomes("+"), "both/letters/5-shot"
    a = results("a", {SCORE: outcomes("++--"), "words/cloze/0-shot": one, both: outcomes("+-"), "x/cloze/0-shot": one})
    b = results("b", {SCORE: outcomes("++-+"), "words/letters/5-shot": one, both: outcomes("+-"), "y/cloze/0-shot": one})
    b.scores["both/letters/5-shot"] = Answers("both/letters/5-shot", "both", 2, 0.5, outcomes("+-"), examples="other")
    b.scores["x/cloze/0-shot"] = Answers("x/cloze/0-shot", "x", 1, 1.0, {"other": Outcome("other", 1.0)})
    found = compare([a, b])["comparisons"][0]
    assert [row["score"] for row in found["scores"]] == [SCORE]
    assert {one["score"]: one["reason"] for one in found["not_comparable"]} == {
        "words/cloze/0-shot": "b has words only in another formulation: words/letters/5-shot",
        "words/letters/5-shot": "a has words only in another formulation: words/cloze/0-shot",
        "both/letters/5-shot": "the worked examples before the questions differ",
        "x/cloze/0-shot": "no item was asked of both",
        "y/cloze/0-shot": "a has no score of y",
    }
    assert found["pooled"] is None
    with pytest.raises(UserError, match=r"a and c have no score.*in common.*lmworks evaluate"):
        compare([a, results("c", {"z/cloze/0-shot": outcomes("+")})])


def test_replies_that_were_drawn_otherwise_are_not_compared() -> None:
    """pass@1 of greedy replies is another figure than that of replies at a temperature, under the same name."""
    passed, sums = "humaneval/generate/0-shot/pass@1", {SCORE: outcomes("++--")}
    a, b = (results(name, sums | {passed: outcomes("+-")}) for name in "ab")
    b.scores[passed] = replace(b.scores[passed], sampling="temperature 0.8, top_p 0.95")
    found = compare([a, b])["comparisons"][0]
    assert [row["score"] for row in found["scores"]] == [SCORE]
    said = "the replies of a are greedy, and those of b drawn at temperature 0.8, top_p 0.95"
    assert found["not_comparable"] == [{"score": passed, "reason": said}]


def test_only_common_items_count() -> None:
    a, b = outcomes("+" * 30), outcomes("-" * 30)
    del a["3"], b["4"], b["5"]
    row = compare([results("a", {SCORE: a}), results("b", {SCORE: b})])["comparisons"][0]["scores"][0]
    assert (row["n"], row["only_a"], row["only_b"]) == (27, 2, 1)
    assert row["verdict"] == "worse"


def test_items_of_equal_ids_that_ask_something_else_are_left_out_and_counted() -> None:
    """By default an id is the number of a row, and rows change between the evaluations of two models."""
    def asked(right: str, hashes: str) -> dict[str, Outcome]:
        return {key: replace(one, asked=name) for (key, one), name in zip(outcomes(right).items(), hashes, strict=True)}

    a, b = results("a", {SCORE: asked("++++++", "abcdef")}), results("b", {SCORE: asked("--++++", "xbcdez")})
    document = compare([a, b])
    found = document["comparisons"][0]
    (row,) = found["scores"]
    assert (row["n"], row["lost_ids"], row["gained"], row["only_a"], row["only_b"]) == (4, ["1"], 0, 2, 2)
    told = "2 of 6 items of equal ids ask something else: the rows or the prompt have changed; they are left out"
    assert found["not_comparable"] == [{"score": SCORE, "reason": told}]
    assert f"not comparable: {SCORE}: {told}" in text(printable_comparison(document))
    with pytest.raises(UserError, match="6 of 6 items of equal ids ask something else: the rows or the prompt have changed"):
        compare([a, results("c", {SCORE: asked("++++++", "uvwxyz")})])


def test_records_without_hashes_are_paired_by_their_questions() -> None:
    questions = {("sums", str(n)): (f"{n} + 1", str(n + 1)) for n in range(6)}
    a = results("a", {SCORE: outcomes("++++++")}, questions=questions)
    b = results("b", {SCORE: outcomes("--++++")}, questions=questions | {("sums", "0"): ("0 + 1", "2"), ("sums", "1"): ("1 + 2", "2")})
    del a.questions["sums", "5"]  # of an unknown question nothing is said
    (row,) = compare([a, b])["comparisons"][0]["scores"]
    assert (row["n"], row["lost"]) == (4, 0)


def test_a_published_score_is_compared_unpaired() -> None:
    a = results("a", {SCORE: outcomes("+" * 60 + "-" * 40)})
    b = Results("peer", "t.json", {SCORE: Answers(SCORE, "sums", 1000, 0.8)}, published=True)
    document = compare([a, b])
    row = document["comparisons"][0]["scores"][0]
    assert (row["kind"], row["n"], row["verdict"]) == ("unpaired", 100, "better")
    assert "lost" not in row
    assert document["failures"].keys() == {"a"}
    assert "unpaired" in text(printable_comparison(document))


def test_all_tests_are_corrected_together() -> None:
    """A p of 0.03 alone is a verdict; among the tests of two other models and a mean it is none."""
    a = results("a", {SCORE: outcomes("+" * 6 + "-" * 20), "words/cloze/0-shot": outcomes("+-" * 10)})
    better = results("b", {SCORE: outcomes("+" * 12 + "-" * 14), "words/cloze/0-shot": outcomes("+-" * 10)})
    alone = compare([results(one.name, {SCORE: one.scores[SCORE].items or {}}) for one in (a, better)])
    assert alone["comparisons"][0]["scores"][0]["verdict"] == "better"
    document = compare([a, better, results("c", {SCORE: outcomes("+" * 6 + "-" * 20), "words/cloze/0-shot": outcomes("+-" * 10)})])
    row = document["comparisons"][0]["scores"][0]
    assert document["tests"] == 6
    assert row["p"] == pytest.approx(0.03125) and row["adjusted_p"] == pytest.approx(6 * 0.03125)
    assert row["verdict"] == "no difference shown"
    assert document["comparisons"][0]["pooled"]["n"] == 46


def test_subjects_are_clusters_where_there_are_enough() -> None:
    def made(subjects: int, seed: int) -> dict[str, Outcome]:
        rng = np.random.default_rng(seed)
        return {str(i): Outcome(str(i), float(rng.random() < 0.5), subject=f"s{i % subjects}") for i in range(120)}

    for subjects, kind, units in ((12, "paired, clustered", 12), (9, "paired", 120), (1, "paired", 120)):
        document = compare([results(name, {SCORE: made(subjects, seed)}) for seed, name in enumerate("ab")])
        row = document["comparisons"][0]["scores"][0]
        assert (row["kind"], row["units"], row["n"]) == (kind, units, 120)
    assert sum(one["n"] for one in row["by_subject"]) == 120


def test_held_out_text_is_paired_by_document() -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(500, 4000, 60)
    level = rng.normal(1.5, 0.3, 60)  # documents differ far more than the models do
    a = {f"d{i}": Document("code" if i % 2 else "prose", int(sizes[i]), float(sizes[i] * level[i])) for i in range(60)}
    b = {key: Document(one.domain, one.bytes, one.bits * (0.98 + 0.01 * rng.random())) for key, one in a.items()}
    b["more"] = Document("prose", 100, 1e6)
    rows = compare([Results("a", "", {}, a), Results("b", "", {}, b)])["comparisons"][0]["bits_per_byte"]
    with pytest.raises(UserError, match="only 0 held-out documents"):
        compare([Results("a", "", {}, a), Results("b", "", {}, {"more": b["more"]})])
    assert [(row["domain"], row["n"]) for row in rows] == [(OVERALL, 60), ("code", 30), ("prose", 30)]
    assert rows[0]["a"] == pytest.approx(sum(one.bits for one in a.values()) / sizes.sum())
    assert all(row["verdict"] == "better" and row["difference"] < 0 for row in rows)


def test_failures_by_kind_subject_and_length() -> None:
    kinds = ["no answer", "format", "truncated", "wrong"]
    items = {
        str(i): Outcome(str(i), float(not kind), f"s{i % 2}", failure=kind, tokens=10 * (i // 10), answer=f"<{i}>")
        for i, kind in enumerate([*kinds, None] * 8)
    }
    found = failures(results("a", {SCORE: items}), examples=2)[SCORE]
    assert (found["n"], found["failed"]) == (40, 32)
    assert found["kinds"] == dict.fromkeys(kinds, 8)
    assert [(row["subject"], row["n"], row["failed"]) for row in found["by_subject"]] == [("s0", 20, 16), ("s1", 20, 16)]
    assert [(row["tokens"], row["n"]) for row in found["by_length"]] == [([0, 0], 10), ([10, 10], 10), ([20, 20], 10), ([30, 30], 10)]
    assert [one["id"] for one in found["examples"]["truncated"]] == ["2", "7"]
    shown = text(failure_tables("a", {SCORE: found}))
    for part in ("20 to 20 tokens", "worst subjects", "truncated: sums/cloze/0-shot 2", "<2>"):
        assert part in shown


def write(folder: Path, name: str, *lines: dict[str, Any] | str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def test_records_are_read_and_broken_ones_are_one_line(tmp_path: Path) -> None:
    described = {"examples": {"fingerprint": "f"}, "temperature": 0.8, "top_p": 0.95, "form": "cloze", "truncated": 1}
    write(tmp_path, "results.json", {"models": {"m": {"scores": {SCORE: described}}}})
    line = {"score": SCORE, "set": "sums", "id": "1", "subject": "s", "correct": False, "failure": "odd", "tokens": 7, "value": 0.5}
    write(tmp_path, "outcomes-m.jsonl", line, line | {"id": "2", "correct": True, "failure": None, "value": math.inf, "tokens": "x"})
    write(tmp_path, "documents-m.jsonl", {"document": "d", "domain": "prose", "bytes": 10, "bits": 20.0})
    write(tmp_path, "questions.jsonl", {"set": "sums", "id": "1", "question": "1+1", "answer": "2"})
    found = read_results(tmp_path, "m", "label")
    answers = found.scores[SCORE]
    assert (answers.n, answers.score, answers.examples, answers.sampling) == (2, 0.5, "f", "temperature 0.8, top_p 0.95")
    assert answers.items and answers.items["1"] == Outcome("1", 0.0, "s", "", "wrong", 7, 0.5)
    assert answers.items["2"] == Outcome("2", 1.0, "s")
    assert found.notes == [f"1 of 2 items of {SCORE} were longer than the context of the model, and lost their beginnings"]
    assert found.documents == {"d": Document("prose", 10, 20.0)} and found.questions == {("sums", "1"): ("1+1", "2")}
    write(tmp_path, "outcomes-m.jsonl", line, {"score": SCORE, "set": "sums"})
    with pytest.raises(UserError, match="line 2 has no text under 'id'"):
        read_results(tmp_path, "m", "label")
    write(tmp_path, "outcomes-m.jsonl", "{", "")
    with pytest.raises(UserError, match="line 1 is not JSON"):
        read_results(tmp_path, "m", "label")
