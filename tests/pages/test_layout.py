"""All pages in a real browser, wide and narrow, light and dark: nothing is cut, nothing collides, all can be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hard_pages import write_pages

from page_layout import TEXTS_OF_CANVASES, faults

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDE, NARROW = 1400, 400  # CSS pixels: a notebook's window, a phone


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, analysis: dict[str, Any]) -> dict[str, Path]:
    return write_pages(tmp_path_factory.mktemp("pages"), analysis)


@pytest.fixture
def open_at(browser: Browser) -> Iterator[Any]:
    """Opens a page at a width; a script error, console message or refused resource fails the test."""
    contexts, wrong = [], []

    def opened(page: Path, width: int, theme: str = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)  # type: ignore[arg-type]
        context.add_init_script(TEXTS_OF_CANVASES)
        contexts.append(context)
        tab = context.new_page()
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on(
            "console", lambda message: "willReadFrequently" in message.text or wrong.append(message.text)
        )  # which the checks themselves do
        tab.on("requestfailed", lambda request: wrong.append(request.url))
        tab.goto(page.as_uri())
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


NAMES = ("hard", "usual", "runs", "empty", "one-step", "no-steps", "nan", "gaps", "ablation", "quantization", "comparison", "corpus")


@pytest.mark.slow  # 50 s for all
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_cut_and_nothing_collides(pages: dict[str, Path], open_at: Any, name: str, width: int, theme: str) -> None:
    assert set(pages) == set(NAMES)
    page = open_at(pages[name], width, theme)
    assert faults(page) == []
    for entry in page.locator(".numbers summary").all():
        entry.click()
    assert faults(page) == [], "with the tables of numbers"
    for choice in ("tokens", "time") if page.locator("#controls .axis").is_visible() else ():
        page.get_by_label("x axis").select_option(choice)
        page.get_by_label("log y").set_checked(choice == "time")
        assert faults(page) == [], choice


def test_the_pages_with_charts_fit_a_phone(pages: dict[str, Path], open_at: Any) -> None:
    for name in ("hard", "nan", "gaps", "ablation"):
        assert faults(open_at(pages[name], NARROW)) == [], name


PLANTED = {
    "cut": "document.querySelector('.tiles small').style.cssText = 'width: 2rem; height: 1rem; overflow: hidden'",
    "collides": "document.querySelectorAll('.tiles dt')[2].style.cssText = 'position: relative; top: 1.6rem'",
    "outside of the window": "document.querySelector('.lead').style.cssText = 'position: relative; left: 90vw; width: 40vw'",
    "the page scrolls sideways": "",
    "broken letter by letter": "document.querySelector('.about').style.cssText = 'width: 1rem; overflow-wrap: anywhere'",
    "contrast": "document.querySelector('footer').style.color = 'color-mix(in srgb, var(--soft) 50%, var(--ground))'",
    "columns out of sight": "document.querySelector('.bits').style.cssText = 'display: block; width: 200vw'",
    "a chart without lines": "charts[1].u.data.forEach((one, n) => n && one.fill(null)), charts[1].u.redraw()",
    "a label of a chart is cut": "(c => { c.textAlign = 'left'; c.fillText('a label', c.canvas.width - 3, 40); })(charts[0].u.ctx)",
    "labels of a chart collide": "[0, 3].forEach(x => charts[0].u.ctx.fillText('a label', 90 + x, 40))",
    "an id twice": "document.querySelectorAll('figure')[1].id = document.querySelectorAll('figure')[0].id",
}


def test_what_is_wrong_is_seen(pages: dict[str, Path], open_at: Any) -> None:
    page = open_at(pages["usual"], NARROW)
    assert faults(page) == []
    for script in PLANTED.values():
        page.evaluate(f"() => {{ {script} }}")
    found = faults(page)
    assert [what for what in PLANTED if not any(one.startswith(what) or f": {what}" in one for one in found)] == [], found
