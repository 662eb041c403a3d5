"""The page of a comparison: all its parts, and hostile text in each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_runs import HOSTILE
from test_run_page import Page

from lmworks.evaluate.comparison import compare
from lmworks.evaluate.results import Answers, Document, Outcome, Results
from lmworks.pages.model_pages import _comparison, write_comparison_page

SCORE = "sums/cloze/0-shot"


def results(name: str, right: str, word: str) -> Results:
    items = {
        str(i): Outcome(str(i), float(c == "+"), f"{word}{i % 2}", failure=None if c == "+" else "wrong", tokens=i, answer=word)
        for i, c in enumerate(right)
    }
    scores = {SCORE: Answers(SCORE, "sums", len(items), right.count("+") / len(items), items)}
    scores["words/cloze/0-shot"] = Answers("words/cloze/0-shot", "words", len(items), right.count("+") / len(items), items)
    documents = {str(i): Document(word, 100, 100.0 + len(name) + i) for i in range(8)}
    return Results(name, word, scores, documents, {("sums", str(i)): (f"{word} {i}?", word) for i in range(len(items))}, [word])


@pytest.mark.parametrize("word", ["plain", HOSTILE])
def test_the_page_shows_all_and_runs_nothing(tmp_path: Path, word: str) -> None:
    a, b = results("one", "+" * 30, word), results(f"two {word}", "-" * 28 + "++", word)
    scores = {SCORE: Answers(SCORE, "sums", 500, 0.9), "x/cloze/0-shot": Answers("x/cloze/0-shot", "x", 9, 1.0)}
    table = Results("peer", "t.csv", scores, published=True)
    path = tmp_path / "page.html"
    write_comparison_page(path, compare([a, b, table], examples=1))
    page = Page(path.read_text())
    for part in (
        f"two {word} against one", "-93.3", "worse", "mean of 2 scores", "Held-out bits per byte", "all items", "0 to 7 tokens",
        f"{word} 0?", f"one: {word}", "Not comparable: x/cloze/0-shot: one has no score of x", "unpaired", "Holm",
    ):  # fmt: skip
        assert part in page.text, part
    assert {"compared-1", "compared-2", "failures", "how"} <= page.ids
    assert not page.of("script") and not page.of("img")
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert all(str(attrs.get(name, "data:")).startswith(("data:", "#")) for _, attrs in page.elements for name in ("src", "href"))
    bars = [str(one["style"]) for one in page.of("i") if "style" in one]
    assert bars and all(0 <= float(part.split(":")[1].rstrip("%")) <= 100 for bar in bars for part in bar.split(";"))


def test_a_worse_model_is_drawn_left_of_zero_and_a_better_one_right_of_it(tmp_path: Path) -> None:
    weak, strong = results("weak", "-" * 28 + "++", "w"), results("strong", "+" * 30, "w")
    for models, verdict, side in (([strong, weak], "worse", "below"), ([weak, strong], "better", "above")):
        (one,) = compare(models, examples=1)["comparisons"]
        rows = _comparison(one)["rows"]
        assert rows and {(row["verdict"], row["side"]) for row in rows} == {(verdict, side)}
        for row in rows:
            assert (row["dot"] > 50) == (verdict == "better") and row["left"] <= row["dot"] <= row["left"] + row["width"]
