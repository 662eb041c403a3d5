"""The corpus page: what it shows is what was found, and hostile names stay text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lmworks.corpus.histogram import Histogram
from lmworks.pages.corpus_page import Distribution, _funnel, render

HOSTILE = "<script>alert(1)</script>&\"'"


def test_the_page_says_what_was_found(analysis: dict[str, Any]) -> None:
    page = render(analysis)
    whole = analysis["whole"]
    said = f"of {whole['read']['documents']} read", "docs", "rows", "duplicate", "Length of documents", "Perplexity", "lines dropped"
    for text in said:
        assert text in page, text
    assert str(sum(one["documents"] for one in whole["duplicates"].values())) in page
    assert page.count('<figure class="chart') == 2 + 1 + 2, "lengths, perplexity, what a step measured, and perplexity of two domains"


def test_reasons_have_examples_and_bars_of_their_own(analysis: dict[str, Any]) -> None:
    copied = next(one for one in analysis["examples"] if one["source"] == "rows")
    assert copied["text"].startswith("qxz qxz") and len(copied["text"]) <= 280
    aside = {"step": "max_bytes", "reason": "not_drawn", "documents": 10**6, "bytes": 10**9, "median_bytes": 9.0, "median_perplexity": None}
    tree = json.loads(json.dumps(analysis))
    before = re.findall(r'class="length"><i style="width:([\d.]+)%', render(analysis))
    tree["whole"]["dropped"].insert(0, aside)
    page = render(tree)
    assert re.findall(r'class="length"><i style="width:([\d.]+)%', page) == before, "what was not drawn flattens nothing"
    assert "100.00" in before and "over the source&#39;s limit of bytes" in page.replace("'", "&#39;")
    assert "qxz qxz" in page


def test_what_was_not_drawn_of_a_source_was_not_dropped(analysis: dict[str, Any]) -> None:
    tree = json.loads(json.dumps(analysis))
    before = {kind: text for kind, text, _ in _funnel(tree)[0]["parts"]}
    assert "dropped" in before and "left aside" not in before
    aside = {"step": "max_bytes", "reason": "not_drawn", "documents": 9, "bytes": 5 * 10**6, "median_bytes": 9.0, "median_perplexity": None}
    tree["whole"]["dropped"].append(aside)
    tree["whole"]["read"]["bytes"] += aside["bytes"]
    assert {kind: text for kind, text, _ in _funnel(tree)[0]["parts"]} == before | {"left aside": "5 MB"}


def test_names_stay_text(analysis: dict[str, Any]) -> None:
    example = {"reason": analysis["whole"]["dropped"][0]["reason"], "source": "rows", "id": HOSTILE, "text": HOSTILE}
    page = render(analysis | {"name": HOSTILE, "unread": {HOSTILE: HOSTILE}, "examples": [example]})
    assert page.count("<script") == 2 and page.count("&lt;script&gt;") >= 5, "the numbers of the charts and what draws them, no other"
    assert not re.search(r"(src|href)=\"(?!#|data:)", page), "nothing is loaded"


def test_an_empty_side_is_shown_as_empty(analysis: dict[str, Any]) -> None:
    nothing = {"count": 0}
    tree = json.loads(json.dumps(analysis))
    for one in [tree["whole"], *tree["sources"], *tree["domains"].values()]:
        one["train"] |= {"documents": 0, "bytes": 0, "words": None, "tokens": None, "languages": {}}
        one["train"] |= {"lengths": nothing, "perplexity": nothing}
        one["read"] |= {"perplexity": nothing}
    assert "–" in render(tree)


@pytest.mark.parametrize("log", [True, False])
def test_a_distribution_holds_every_document(log: bool) -> None:
    values = Histogram()
    values.add([0.5] * 10 + [1.0, 2.0, 4.0, 400.0] * 25)
    other = Histogram()
    other.add([3.0] * 7)
    chart = Distribution("x", "X", "", {"read": values.as_json(), "kept": other.as_json()}, log=log).chart()
    for line in chart.lines:
        assert sum(y for _, y in line.finite[:-1]) == pytest.approx(1, abs=1e-9)
        assert [x for x, _ in line.points] == sorted({x for x, _ in line.points})
        assert line.points[-1][1] == line.points[-2][1], "the last bin ends at the last edge"
    assert chart.lines[1].name == "kept, median 3" and chart.log_x is log


def test_a_distribution_of_one_value() -> None:
    for value in (0.0, 5.0, -2.0):
        one = Histogram()
        one.add([value])
        assert Distribution("x", "X", "", {"read": one.as_json(), "kept": {"count": 0}}).chart().lines
