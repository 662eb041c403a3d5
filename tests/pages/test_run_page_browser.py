"""The run page in a real browser."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from page_runs import HOSTILE, STEPS, write_metrics, write_run, write_samples

import written_run
from lmworks.pages.run_page import write_page
from lmworks.watch.ledger import RunLock

if TYPE_CHECKING:
    from playwright.sync_api import Browser, FloatRect, Page


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
    page.on("console", lambda message: "willReadFrequently" in message.text or wrong.append(message.text))  # which a test does
    page.on("requestfailed", lambda request: wrong.append(request.url))
    yield page
    context.close()
    assert not wrong


def value(page: Page, chart: str, entry: int = 0) -> str:
    return page.locator(f"#{chart} .legend b").nth(entry).inner_text()


def over(page: Page, chart: str) -> FloatRect:
    """The place of the lines of a chart."""
    plot = page.locator(f"#{chart} .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box
    return box


def scale(page: Page, chart: str, axis: str = "x") -> tuple[float, float]:
    found = page.evaluate(f"charts.find(one => one.figure.id === '{chart}').u.scales.{axis}")
    low, high = found["min"], found["max"]
    return low, high


def settle(page: Page) -> None:
    """Wait until the charts are drawn again, in the next frame."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))")


def drawn(page: Page, chart: str) -> str:
    """What the canvas of a chart shows."""
    return str(page.evaluate(f"document.querySelector('#{chart} canvas').toDataURL()"))


def test_the_cursor_reads_values_and_is_shared(page: Page, report: str) -> None:
    page.goto(report)
    assert page.locator("figure.chart canvas").count() == page.locator("figure.chart").count() >= 12
    resting = value(page, "pretrain-loss"), value(page, "pretrain-norm")
    assert resting == ("2.299", "1.017")
    box = over(page, "pretrain-loss")
    page.mouse.move(box["x"] + box["width"] * 9 / (STEPS - 1), box["y"] + 60)
    chip = page.locator("#pretrain-loss .chip")
    assert chip.inner_text() == "step 10 · 640 tokens\nphase general"
    assert value(page, "pretrain-loss") == "5.639"  # 2 + 6 exp(-10/20)
    assert value(page, "pretrain-norm") == "1.1"
    assert page.locator("#pretrain-norm .u-cursor-x").is_visible()
    assert not page.locator("#pretrain-norm .chip").is_visible()
    page.mouse.move(box["x"] + box["width"] * 19 / (STEPS - 1), box["y"] + 60)
    assert "not finite, no update" in chip.inner_text() and value(page, "pretrain-loss") == "not finite"
    page.mouse.move(5, 5)
    assert (value(page, "pretrain-loss"), value(page, "pretrain-norm")) == resting
    assert not chip.is_visible()


def test_larger_values_are_drawn_higher_and_the_line_is_interrupted(page: Page, report: str) -> None:
    """The highest and the lowest pixel of the loss stand where the record has its first and last step; at step 20 there is none."""
    page.goto(report)
    columns = page.evaluate("""() => {
      const { bbox, ctx } = charts.find(one => one.figure.id === "pretrain-loss").u, [red, green, blue] = canvasColor(color("c0"));
      return [0.02, 19 / 59, 0.98].map(share => {
        const { data } = ctx.getImageData(bbox.left + Math.round(share * (bbox.width - 1)), bbox.top, 1, bbox.height), found = [];
        for (let y = 0; y < bbox.height; y++) {
          const off = Math.abs(data[4 * y] - red) + Math.abs(data[4 * y + 1] - green) + Math.abs(data[4 * y + 2] - blue);
          if (off < 60) found.push(y / bbox.height);
        }
        return found;
      });
    }""")
    first, gap, last = columns
    assert first and last and max(first) < 0.2 and min(last) > 0.8 and not gap
    assert scale(page, "pretrain-ratio", "y")[0] == 0, "loads are drawn from zero"
    assert scale(page, "pretrain-loss", "y")[0] > 1, "and a loss is not"
    lowest = page.evaluate("charts.find(one => one.figure.id === 'pretrain-ratio').yRange(0, 4)[0]")
    assert -0.5 < lowest < 0, "a line of zeros lies within its chart and not on the border"
    found = page.evaluate("charts.find(one => one.figure.id === 'pretrain-bpb-overall').yRange(1, 2)")
    assert found[0] < 1 and found[1] > 2.3, "the level of xz is within the axis"


def test_the_heat_map_reads_layers(page: Page, report: str) -> None:
    page.goto(report)
    box = over(page, "pretrain-cv-heat")
    page.mouse.move(box["x"] + box["width"] * 9 / (STEPS - 1), box["y"] + box["height"] * 0.75)
    assert value(page, "pretrain-cv-heat") == "layer 2: 0.2"


def test_the_keyboard_reads_values(page: Page, report: str) -> None:
    page.goto(report)
    page.locator("#pretrain-loss .plot").focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert "step 3" in page.locator("#spoken").inner_text()
    assert "loss 7.164" in page.locator("#spoken").inner_text()


def test_the_axes_are_chosen(page: Page, report: str) -> None:
    page.goto(report)
    before = drawn(page, "pretrain-loss")
    assert scale(page, "pretrain-loss") == (1, STEPS)
    page.get_by_label("x axis").select_option("tokens")
    settle(page)
    assert scale(page, "pretrain-loss") == (64, 64 * STEPS)
    page.get_by_label("x axis").select_option("time")
    settle(page)
    assert scale(page, "pretrain-loss")[1] < 1, "hours"
    page.get_by_label("x axis").select_option("step")
    settle(page)
    page.get_by_label("log y").check()
    settle(page)
    assert page.evaluate("charts[0].u.scales.y.distr") == 3
    page.get_by_label("log y").uncheck()
    settle(page)
    assert page.evaluate("charts[0].u.scales.y.distr") == 1
    assert drawn(page, "pretrain-loss") == before
    page.get_by_label("smoothing").fill("10")
    settle(page)
    assert drawn(page, "pretrain-loss") != before


def test_a_stretch_is_zoomed_into_and_lines_are_hidden(page: Page, report: str) -> None:
    page.goto(report)
    before = drawn(page, "pretrain-norm")
    box = over(page, "pretrain-loss")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 60, steps=3)
    page.mouse.up()
    page.mouse.move(5, 5)
    for chart in ("pretrain-loss", "pretrain-norm"):  # all charts of the stage
        low, high = scale(page, chart)
        assert 29 < low < 32 and 58 < high <= 60
    assert not page.locator("#pretrain-loss .mark.bad").is_visible()  # at step 20, before the stretch
    page.get_by_role("button", name="show all").click()
    assert scale(page, "pretrain-norm") == (1, STEPS) and drawn(page, "pretrain-norm") == before
    page.locator("#pretrain-loss .plot").focus()
    page.keyboard.press("+")
    assert scale(page, "pretrain-norm")[0] > 20
    page.keyboard.press("0")
    assert drawn(page, "pretrain-norm") == before
    entry = page.locator("#pretrain-ratio .legend li").first
    shown = drawn(page, "pretrain-ratio")
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false" and drawn(page, "pretrain-ratio") != shown
    entry.press("Enter")
    assert entry.get_attribute("aria-pressed") == "true" and drawn(page, "pretrain-ratio") == shown


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that was running ten minutes ago, of 1,500 steps whose losses are not finite from step 401 to 700, beside one that has come to
    step 600."""
    folder = tmp_path_factory.mktemp("long")
    loss = [None if 400 < step <= 700 else 11 - step / 250 for step in range(1, 1501)]
    runs = [written_run.write_run(folder / f"run-{n}", {"train/loss": values}) for n, values in enumerate((loss, [1.0] * 600))]
    with RunLock(runs[0]):
        path = write_page(runs[0], others=runs[1:])
    path.write_text(re.sub(r'(?<=data-at=")\d+', str(int(time.time()) - 600), path.read_text(encoding="utf-8")), encoding="utf-8")
    return path.as_uri()


def test_values_are_read_out_with_the_steps_that_they_are_of(page: Page, long: str) -> None:
    page.goto(long)
    box = over(page, "pretrain-loss")
    assert [value(page, "pretrain-loss", n) for n in (0, 1)] == ["5", "1"], "the last step alone"
    chip, found = page.locator("#pretrain-loss .chip"), {}
    for step in (42, 600, 690, 1000):
        page.mouse.move(box["x"] + box["width"] * (step - 1) / 1499, box["y"] + 60)
        found[step] = (value(page, "pretrain-loss"), value(page, "pretrain-loss", 1), chip.inner_text().partition("\n")[2])
    assert found == {
        42: ("10.83", "1", "loss: mean of steps 41–44\nwritten (run-1): mean of steps 41–42"),
        600: ("not finite", "1", "loss: no finite value in steps 401–700\nwritten (run-1): mean of steps 599–600"),
        690: ("not finite", "–", "no finite value in steps 401–700"),
        1000: ("7.006", "–", "mean of steps 997–1,000"),
    }
    smoothed = page.evaluate("Math.min(...charts[0].u.data[charts[0].lines[0].series.at(-1)].filter(y => y > 9))")
    assert smoothed > 9.38, "the mean that is drawn does not reach over the gap"


def test_what_the_reader_has_chosen_outlasts_a_reload_which_does_not_come_while_someone_reads(page: Page, long: str) -> None:
    page.goto(long)
    assert "10 minutes ago" in page.evaluate("getComputedStyle(document.querySelector('.state'), '::after').content")
    page.get_by_label("log y").check()
    page.locator("#pretrain-loss .legend li").first.click()
    page.reload()
    assert page.get_by_label("log y").is_checked() and page.evaluate("charts[0].u.scales.y.distr") == 3
    entry = page.locator("#pretrain-loss .legend li").first
    assert (
        entry.get_attribute("aria-pressed") == "false" and page.evaluate("charts[0].u.series[charts[0].lines[0].series[0]].show") is False
    )
    assert page.evaluate("look()") is True
    page.locator("#pretrain-loss .numbers summary").click()
    assert page.evaluate("look()") is False


def test_a_mark_says_what_it_is(page: Page, report: str) -> None:
    page.goto(report)
    over(page, "pretrain-loss")
    box = page.locator("#pretrain-loss .mark.checkpoint").first.bounding_box()
    assert box
    page.mouse.move(box["x"] + 4, box["y"] + 4)
    chip = page.locator("#pretrain-loss .chip")
    assert "step 30: checkpoint" in chip.inner_text() and "step 30: resumed" in chip.inner_text()
    covering = chip.bounding_box()
    assert covering and covering["y"] + covering["height"] <= box["y"]  # the triangles stay to be seen


def test_logarithmic_steps(page: Page, report: str) -> None:
    page.goto(report)
    page.get_by_label("log x").check()
    settle(page)
    assert page.evaluate("charts[0].u.scales.x.distr") == 3
    box = over(page, "pretrain-loss")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    assert page.locator("#pretrain-loss .chip").inner_text().startswith("step 8 ")  # the root of 60


def test_the_numbers_are_saved(page: Page, report: str) -> None:
    page.goto(report)
    page.locator("#pretrain-bpb-overall .numbers summary").click()
    with page.expect_download() as download:
        page.locator("#pretrain-bpb-overall").get_by_role("button", name="Save as CSV").click()
    assert download.value.suggested_filename == "pretrain-bpb-overall.csv"
    head, *rows = csv.reader(Path(download.value.path()).read_text(encoding="utf-8").splitlines())
    assert head == ["line", "step", "tokens", "hours", "value", "lowest", "highest"]
    assert [(row[1], row[2], row[4]) for row in rows] == [("20", "1280", "2.5"), ("40", "2560", "2.25"), ("60", "3840", "2.1667")]


def test_light_and_dark(page: Page, report: str) -> None:
    page.goto(report)
    ground, line = "getComputedStyle(document.body).backgroundColor", "color('c0')"
    light = page.evaluate(ground), page.evaluate(line), drawn(page, "pretrain-loss")
    page.locator("#theme").click()
    for dark, bright in zip((page.evaluate(ground), page.evaluate(line), drawn(page, "pretrain-loss")), light, strict=True):
        assert dark != bright
    page.reload()
    assert page.evaluate(ground) != light[0]  # it is remembered


def test_it_is_whole_without_scripts(browser: Browser, report: str) -> None:
    context = browser.new_context(java_script_enabled=False, color_scheme="dark")
    page = context.new_page()
    page.goto(report)
    assert "drawn by a script" in page.locator("noscript").inner_text()
    assert value(page, "pretrain-loss") == "2.299"
    page.locator("#pretrain-loss .numbers summary").click()
    assert re.split(r"\s+", page.locator("#pretrain-loss .numbers tbody").inner_text()) == ["loss", "7.707", "2.299", "7.707", "2.299"]
    assert not page.locator("#controls").is_visible()
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.locator("#theme").click()
    assert page.evaluate(ground) != dark
    context.close()


def test_nothing_is_loaded(page: Page, report: str) -> None:
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.goto(report)
    assert [url for url in seen if not url.startswith("data:")] == [report]
    assert Path(report.removeprefix("file://")).stat().st_size < 400_000


def test_rows_of_one_moment_have_an_axis_of_time(page: Page, tmp_path: Path) -> None:
    """All hours are 0, which uPlot by itself draws as 0 to 100."""
    run = tmp_path / "moment"
    run.mkdir()
    with patch.object(time, "monotonic", lambda: 1.0):
        write_metrics(run, 1, 30)
    page.goto(write_page(run).as_uri())
    page.get_by_label("x axis").select_option("time")
    settle(page)
    assert scale(page, "pretrain-loss") == (0, 1) and page.locator("button[name=whole]").is_hidden()
