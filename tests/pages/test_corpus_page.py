"""The corpus page: what it shows is what was found, hostile names stay text, and a browser draws it on any screen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lmworks.corpus import prepare
from lmworks.corpus.analysis.analyze import analyze
from lmworks.corpus.histogram import Histogram
from lmworks.pages.corpus_page import Distribution, _funnel, render, write_corpus_page
from lmworks.recipe.schema.corpus import Corpus, Source
from lmworks.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "<script>alert(1)</script>&\"'"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The figures of a corpus of two sources with copies and noise; the step `lines` measures something."""
    folder = tmp_path_factory.mktemp("corpus")
    docs = Source(name="docs", kind="stdlib", document_format="docs", include="email/*.py", domain="docs", license=HOSTILE)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"{'qxz ' * 60}{number % 5}"}) + "\n" for number in range(20)))
    rows = Source(name="rows", kind="jsonl", path=str(folder / "rows.jsonl"), domain="web", rules="none", license="x")
    steps = [{"step": "clean"}, {"step": "lines", "min_length": 1}, {"step": "rules"}]
    plain = {"validation_fraction": 0.1, "dedup": {"minhash": None}, "decontaminate": None}
    prepare(Recipe(name="looked-at", corpus=Corpus(sources=[docs, rows], steps=steps, **plain)), folder / "out")
    return analyze(folder / "out")


def test_the_page_says_what_was_found(found: dict[str, Any]) -> None:
    page = render(found)
    whole = found["whole"]
    said = f"of {whole['read']['documents']} read", "docs", "rows", "duplicate", "Length of documents", "Perplexity", "lines dropped"
    for text in said:
        assert text in page, text
    assert str(sum(one["documents"] for one in whole["duplicates"].values())) in page
    assert page.count('<figure class="chart"') == 2 + 1 + 2, "lengths, perplexity, what a step measured, and perplexity of two domains"


def test_reasons_have_examples_and_bars_of_their_own(found: dict[str, Any]) -> None:
    copied = next(one for one in found["examples"] if one["source"] == "rows")
    assert copied["text"].startswith("qxz qxz") and len(copied["text"]) <= 280
    aside = {"step": "max_bytes", "reason": "not_drawn", "documents": 10**6, "bytes": 10**9, "median_bytes": 9.0, "median_perplexity": None}
    tree = json.loads(json.dumps(found))
    before = re.findall(r'class="length"><i style="width:([\d.]+)%', render(found))
    tree["whole"]["dropped"].insert(0, aside)
    page = render(tree)
    assert re.findall(r'class="length"><i style="width:([\d.]+)%', page) == before, "what was not drawn flattens nothing"
    assert "100.00" in before and "over the source&#39;s limit of bytes" in page.replace("'", "&#39;")
    assert "qxz qxz" in page


def test_what_was_not_drawn_of_a_source_was_not_dropped(found: dict[str, Any]) -> None:
    tree = json.loads(json.dumps(found))
    before = {kind: text for kind, text, _ in _funnel(tree)[0]["parts"]}
    assert "dropped" in before and "left aside" not in before
    aside = {"step": "max_bytes", "reason": "not_drawn", "documents": 9, "bytes": 5 * 10**6, "median_bytes": 9.0, "median_perplexity": None}
    tree["whole"]["dropped"].append(aside)
    tree["whole"]["read"]["bytes"] += aside["bytes"]
    assert {kind: text for kind, text, _ in _funnel(tree)[0]["parts"]} == before | {"left aside": "5 MB"}


def test_names_stay_text(found: dict[str, Any]) -> None:
    example = {"reason": found["whole"]["dropped"][0]["reason"], "source": "rows", "id": HOSTILE, "text": HOSTILE}
    page = render(found | {"name": HOSTILE, "unread": {HOSTILE: HOSTILE}, "examples": [example]})
    assert "<script" not in page and page.count("&lt;script&gt;") >= 5
    assert not re.search(r"(src|href)=\"(?!#|data:)", page), "nothing is loaded"


def test_an_empty_side_is_shown_as_empty(found: dict[str, Any]) -> None:
    nothing = {"count": 0}
    tree = json.loads(json.dumps(found))
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
    view = Distribution("x", "X", "", {"read": values.as_json(), "kept": other.as_json()}, log=log).view()
    for _, path in view["paths"]:
        heights = [1000 - float(height) for height in re.findall(r"V([\d.]+)H", path)]
        top = next(at for at, _ in view["y_ticks"][1:]) * 1000
        share = float(next(text for _, text in view["y_ticks"][1:]).rstrip("%")) / 100
        assert sum(heights) * share / top == pytest.approx(1, abs=0.02)
    assert view["legend"][1][2] == "median 3"


def test_a_distribution_of_one_value() -> None:
    for value in (0.0, 5.0, -2.0):
        one = Histogram()
        one.add([value])
        assert Distribution("x", "X", "", {"read": one.as_json(), "kept": {"count": 0}}).view()["paths"]


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page in which any error, console message or refused resource fails the test."""
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    opened = context.new_page()
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text))
    opened.on("requestfailed", lambda request: wrong.append(request.url))
    yield opened
    context.close()
    assert not wrong


@pytest.mark.parametrize("width", [1100, 390])
def test_a_browser_draws_it(page: Page, found: dict[str, Any], tmp_path: Path, width: int) -> None:
    write_corpus_page(tmp_path / "corpus.html", found)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto((tmp_path / "corpus.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    drawn = page.locator(".plot .area").all()
    assert len(drawn) == 10
    for area in drawn:
        box, plot = area.bounding_box(), area.locator("xpath=ancestor::div[contains(@class, 'plot')]").bounding_box()
        assert box and plot
        assert box["height"] > 20 and plot["y"] - 3 <= box["y"] and box["y"] + box["height"] <= plot["y"] + plot["height"] + 3
    ticks = [tick for tick in page.locator(".ticks.x span").all() if tick.is_visible()]
    for axis in page.locator(".ticks.x").all():
        boxes = [box for tick in axis.locator("span").all() if (box := tick.bounding_box())]
        assert all(a["x"] + a["width"] <= b["x"] for a, b in pairwise(boxes)), "labels do not collide"
    for table in page.locator(".scroll").all():
        assert width > 400 or table.evaluate("one => one.scrollWidth <= one.clientWidth + 1"), "no table is cut"
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.locator("#theme").click()
    assert page.evaluate(ground) != light
    heights = [box["height"] for tick in ticks if (box := tick.bounding_box())]
    assert len(heights) > 10 and max(heights) < 20, "no label is broken over two lines"
