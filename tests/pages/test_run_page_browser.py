"""The run page in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_runs import HOSTILE, STEPS, write_run, write_samples

from lmworks.pages.run_page import write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = tmp_path_factory.mktemp("page") / "trial"
    write_run(run)
    write_samples(run / "samples.jsonl", "On July 4, 1776,", HOSTILE)
    return write_page(run).as_uri()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page in which any script error, console message or refused resource fails the test."""
    context = browser.new_context(viewport={"width": 1100, "height": 900}, color_scheme="light")
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text))
    page.on("requestfailed", lambda request: wrong.append(request.url))
    yield page
    context.close()
    assert not wrong


def value(page: Page, chart: str, entry: int = 0) -> str:
    return page.locator(f"#{chart} .legend b").nth(entry).inner_text()


def test_charts_are_drawn(page: Page, report: str) -> None:
    page.goto(report)
    assert page.locator("figure.chart").count() >= 12
    # what is drawn lies within the plot and is as wide as it
    for place in page.locator("#pretrain-loss .line, #pretrain-norm .line, #pretrain-rate .line").all():
        box, plot = place.bounding_box(), place.locator("xpath=ancestor::div[contains(@class, 'plot')]").bounding_box()
        assert box and plot
        assert box["width"] == pytest.approx(plot["width"], rel=0.02)
        assert plot["y"] - 3 <= box["y"] <= box["y"] + box["height"] <= plot["y"] + plot["height"] + 3
    assert page.locator("#pretrain-cv-heat svg path").count() >= 3


def test_the_cursor_reads_values_and_is_shared(page: Page, report: str) -> None:
    page.goto(report)
    resting = value(page, "pretrain-loss"), value(page, "pretrain-norm")
    assert resting == ("2.299", "1.017")
    plot = page.locator("#pretrain-loss .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 9 / (STEPS - 1), box["y"] + 60)
    chip = page.locator("#pretrain-loss .chip")
    assert chip.inner_text() == "step 10 · 640 tokens"
    assert value(page, "pretrain-loss") == "5.639"  # 2 + 6 exp(-10/20)
    assert value(page, "pretrain-norm") == "1.1"
    assert page.locator("#pretrain-norm .cursor").is_visible()
    assert not page.locator("#pretrain-norm .chip").is_visible()
    page.mouse.move(box["x"] + box["width"] * 19 / (STEPS - 1), box["y"] + 60)
    assert "not finite, no update" in chip.inner_text()
    page.mouse.move(5, 5)
    assert (value(page, "pretrain-loss"), value(page, "pretrain-norm")) == resting
    assert not page.locator("#pretrain-norm .cursor").is_visible()


def test_the_heat_map_reads_layers(page: Page, report: str) -> None:
    page.goto(report)
    plot = page.locator("#pretrain-cv-heat .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 9 / (STEPS - 1), box["y"] + box["height"] * 0.75)
    assert value(page, "pretrain-cv-heat") == "layer 2: 0.2"


def test_the_keyboard_reads_values(page: Page, report: str) -> None:
    page.goto(report)
    page.locator("#pretrain-loss .plot").focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert "step 3" in page.locator("#spoken").inner_text()
    assert "loss 7.164" in page.locator("#spoken").inner_text()


def test_the_script_draws_what_the_page_had(page: Page, browser: Browser, report: str) -> None:
    """The same lines, to a tenth of a thousandth of the plot, though one is drawn in Python and the other in the browser."""
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(report)
    page.goto(report)
    for chart in ("pretrain-loss", "pretrain-norm", "pretrain-rate", "pretrain-bpb-overall"):
        for line in range(page.locator(f"#{chart} .line").count()):
            before, after = (
                [float(n) for n in re.findall(r"-?[\d.]+", str(one.locator(f"#{chart} .line").nth(line).get_attribute("d")))]
                for one in (plain, page)
            )
            assert before == pytest.approx(after, abs=0.21), (chart, line)  # both round to 0.1 of 1000
        assert plain.locator(f"#{chart} .ticks.y").inner_text() == page.locator(f"#{chart} .ticks.y").inner_text()
    context.close()


def line_of(page: Page, chart: str, line: int = 0) -> str:
    return str(page.locator(f"#{chart} .line").nth(line).get_attribute("d"))


def test_the_axes_are_chosen(page: Page, report: str) -> None:
    page.goto(report)
    before = line_of(page, "pretrain-loss")
    assert page.locator("#pretrain-loss .axis").inner_text() == "step"
    page.get_by_label("x axis").select_option("tokens")
    assert page.locator("#pretrain-loss .axis").inner_text() == "tokens"
    assert "3k" in page.locator("#pretrain-loss .ticks.x").inner_text()
    assert line_of(page, "pretrain-loss") == before  # steps of equal size
    page.get_by_label("x axis").select_option("time")
    assert page.locator("#pretrain-loss .axis").inner_text() == "hours of training"
    page.get_by_label("x axis").select_option("step")
    page.get_by_label("log y").check()
    assert line_of(page, "pretrain-loss") != before
    assert "2\n" in page.locator("#pretrain-loss .ticks.y").inner_text()
    page.get_by_label("log y").uncheck()
    smooth = line_of(page, "pretrain-loss", 1)
    page.get_by_label("smoothing").fill("10")
    assert line_of(page, "pretrain-loss", 1) != smooth and line_of(page, "pretrain-loss") == before


def test_a_stretch_is_zoomed_into_and_lines_are_hidden(page: Page, report: str) -> None:
    page.goto(report)
    before = line_of(page, "pretrain-norm")
    plot = page.locator("#pretrain-loss .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"], box["y"] + 60)
    assert page.locator("#pretrain-loss .band").is_visible()
    page.mouse.up()
    assert page.locator("#pretrain-loss .ticks.x span").first.inner_text() in ("30", "35")
    assert line_of(page, "pretrain-norm") != before  # all charts of the stage
    assert not page.locator("#pretrain-loss .mark.resume").is_visible()  # at step 30, before the stretch
    page.get_by_role("button", name="show all").click()
    assert line_of(page, "pretrain-norm") == before
    plot.focus()
    page.keyboard.press("+")
    assert line_of(page, "pretrain-norm") != before
    page.keyboard.press("0")
    assert line_of(page, "pretrain-norm") == before
    entry = page.locator("#pretrain-ratio .legend li").first
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false" and not line_of(page, "pretrain-ratio")
    entry.press("Enter")
    assert line_of(page, "pretrain-ratio")


def test_a_mark_says_what_it_is(page: Page, report: str) -> None:
    page.goto(report)
    page.locator("#pretrain-loss .plot").scroll_into_view_if_needed()
    box = page.locator("#pretrain-loss .mark.checkpoint").first.bounding_box()
    assert box
    page.mouse.move(box["x"] + 4, box["y"] + 4)
    chip = page.locator("#pretrain-loss .chip")
    assert "step 30: checkpoint" in chip.inner_text()
    covering = chip.bounding_box()
    assert covering and covering["y"] + covering["height"] <= box["y"]  # the triangles stay to be seen


def test_logarithmic_steps(page: Page, report: str) -> None:
    page.goto(report)
    page.get_by_label("log x").check()
    plot = page.locator("#pretrain-loss .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    assert page.locator("#pretrain-loss .chip").inner_text().startswith("step 8 ")  # the root of 60


def test_light_and_dark(page: Page, report: str) -> None:
    page.goto(report)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(ground) != light
    page.reload()
    assert page.evaluate(ground) != light  # it is remembered


SCREENS = [(320, "light"), (390, "light"), (390, "dark"), (768, "dark"), (1400, "light")]  # beside those of the fast tests


@pytest.mark.parametrize(
    ("width", "theme"),
    [(320, "dark"), (768, "light"), (1400, "dark"), *(pytest.param(*one, marks=pytest.mark.slow) for one in SCREENS)],
)
def test_it_fits_and_can_be_read(browser: Browser, report: str, width: int, theme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(report)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("window.hacked") is None
    for selector in (
        ".about",
        ".state",
        ".tiles small",
        "figcaption p",
        ".ticks.y span",
        ".legend",
        ".when span",
        ".verdict.above",
        ".license",
        ".timeline span",
        ".stages small",
        "footer",
    ):
        assert page.evaluate(CONTRAST, selector) >= 4.5, selector
    context.close()


def test_it_is_whole_without_scripts(browser: Browser, report: str) -> None:
    context = browser.new_context(java_script_enabled=False, color_scheme="dark")
    page = context.new_page()
    page.goto(report)
    assert page.locator("#pretrain-loss .line").first.is_visible()
    assert value(page, "pretrain-loss") == "2.299"
    assert not page.locator("#controls").is_visible()
    assert not page.get_by_role("button", name="Switch between light and dark").is_visible()
    context.close()


def test_nothing_is_loaded(page: Page, report: str) -> None:
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.goto(report)
    assert [url for url in seen if not url.startswith("data:")] == [report]
    assert Path(report.removeprefix("file://")).stat().st_size < 400_000


# WCAG's contrast of an element's text with the first opaque ground behind it.
CONTRAST = """selector => {
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const rgb = colour => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
    const light = colour => rgb(colour).map(value => value / 255)
        .map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
    const element = document.querySelector(selector);
    let ground = element;
    while (/rgba\\(.*, 0\\)|\\/ [\\d.]+\\)|transparent/.test(getComputedStyle(ground).backgroundColor)) ground = ground.parentElement;
    const [a, b] = [light(getComputedStyle(element).color), light(getComputedStyle(ground).backgroundColor)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
}"""
