"""The chat page in a real browser, against a real server."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from lmworks.inference.batching import ContinuousBatch
from lmworks.serve.models import load_models
from lmworks.serve.server import ServerOptions
from page_layout import faults
from patience import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(autouse=True)
def _no_chance_end(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights could end an answer at any token; here all go on to the limit."""
    monkeypatch.setattr(server.engine.vocabulary, "stop_ids", ())


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 50 tokens a second, so that there is time to stop it."""
    real = ContinuousBatch.step

    def paced(batch: ContinuousBatch) -> Any:
        time.sleep(0.02)
        return real(batch)

    monkeypatch.setattr(ContinuousBatch, "step", paced)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page in which any script error or refused resource fails the test."""
    context = browser.new_context(viewport={"width": 1000, "height": 800})
    page = context.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert [text for text in wrong if "the server responded with a status of 4" not in text] == []


def say(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def finished(page: Page, answers: int = 1) -> None:
    page.wait_for_function("n => document.querySelectorAll('.turn.assistant:not(.writing) .foot span').length === n", arg=answers)


def test_a_message_gets_a_streamed_answer(page: Page, server: Any, slow: None) -> None:
    page.goto(server.url)
    assert page.title() == "tiny · lmworks"
    # Count how often the answer grows: a streamed answer grows many times, one that comes whole once.
    page.evaluate("""() => {
        window.lengths = new Set();
        new MutationObserver(() => { const body = document.querySelector('.body'); if (body) lengths.add(body.textContent.length); })
            .observe(document.getElementById('log'), { subtree: true, childList: true, characterData: true });
    }""")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Longest answer").fill("32")
    say(page, "Hello <b>there</b>")
    finished(page)
    assert page.evaluate("lengths.size") > 5
    assert page.locator(".turn.user").inner_text().endswith("Hello <b>there</b>")
    assert page.locator(".turn.assistant .body").inner_text().strip()
    assert re.search(r"\d+ tokens · \d+ tokens/s", page.locator(".turn.assistant .foot").inner_text())
    say(page, "And again")
    finished(page, 2)
    assert page.get_by_role("button", name="Try again").count() == 1
    page.get_by_role("button", name="Try again").click()
    finished(page, 2)
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    assert page.get_by_role("heading", name="Talk to tiny").is_visible()


def test_what_is_asked_is_what_is_shown(page: Page, server: Any) -> None:
    asked: list[dict[str, Any]] = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    page.goto(server.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Top-p").fill("0.9")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Longest answer").fill("32")
    say(page, "One")
    finished(page)
    say(page, "Two")
    finished(page, 2)
    first, second = asked
    assert (first["temperature"], first["max_tokens"], first["model"]) == (0, 32, "tiny")
    assert (first["top_p"], first["seed"]) == (0.9, 7)
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][0]["content"] == "Be brief."
    said = page.locator(".turn").all_inner_texts()
    page.reload()  # settings and the conversation outlive the page
    assert [text.partition("Copy")[0] for text in page.locator(".turn").all_inner_texts()] == [text.partition("Copy")[0] for text in said]
    say(page, "Three")
    finished(page, 3)
    assert [message["role"] for message in asked[2]["messages"]] == ["system", *("user", "assistant") * 2, "user"]
    page.get_by_role("button", name="New chat").click()
    page.reload()
    assert page.locator(".turn").count() == 0
    assert page.get_by_label("System prompt").input_value() == "Be brief."


def test_stop_button_and_escape(page: Page, server: Any, slow: None, waiting: Any) -> None:
    page.goto(server.url)
    for answer, press in enumerate((lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape")), 1):
        say(page, "Tell me a long story")
        page.locator(".writing .body > *").first.wait_for()
        press()
        finished(page, answer)
        assert "stopped" in page.locator(".turn.assistant .foot").last.inner_text()
        waiting(lambda: server.engine.stats().running == 0)
        assert page.get_by_role("button", name="Send").is_visible()


@pytest.mark.slow
def test_the_oldest_messages_make_room(page: Page, server: Any) -> None:
    page.goto(server.url)
    for number in range(1, 5):
        say(page, f"{number} " + "word " * 20)
        finished(page, number)
    assert page.get_by_text("The oldest messages no longer fit").is_visible()


@pytest.mark.slow
def test_a_message_that_is_too_long_comes_back(page: Page, server: Any) -> None:
    asked: list[dict[str, Any]] = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    page.goto(server.url)
    say(page, "First")
    finished(page)
    say(page, "word " * 400)
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "the context of this model is 256" in alert.inner_text()
    assert page.get_by_label("Your message").input_value() == ("word " * 400).strip()
    assert page.locator(".turn.user").count() == 1
    say(page, "Short")
    finished(page, 2)
    assert alert.count() == 0
    assert [message["content"] for message in asked[-1]["messages"] if message["role"] == "user"][-1] == "Short"
    assert not any("word word" in message["content"] for message in asked[-1]["messages"])


def test_the_key_is_asked_for(page: Page, start: Any) -> None:
    page.goto(start(api_key="sesame").url)
    say(page, "Hello")
    page.get_by_label("API key").fill("sesame")
    page.get_by_role("button", name="Try again").click()
    finished(page)


def test_markdown_is_shown_and_markup_is_not_obeyed(page: Page, server: Any) -> None:
    image, script = "x = '<img src=x onerror=alert(1)>'", "<script>document.title='x'</script>"
    answer = f"<think>hm</think>\n# Title\n\n1. one **bold**\n2. `two`\n\n```py\n{image}\n```\n{script}"
    page.goto(server.url)
    page.evaluate("text => render(document.getElementById('welcome'), text)", answer)
    shown = page.locator("#welcome")
    assert shown.locator("details summary").inner_text() == "Thinking"
    assert shown.locator("h2").inner_text() == "Title"
    assert shown.locator("ol li").count() == 2
    assert shown.locator("strong").inner_text() == "bold"
    assert shown.locator("pre").inner_text() == image
    assert shown.locator("script, img").count() == 0
    assert "<script>" in shown.inner_text()


def test_nothing_is_loaded_from_elsewhere(page: Page, server: Any) -> None:
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.goto(server.url)
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert all(url.startswith((server.url, "data:")) for url in seen)
    policy = page.request.get(server.url).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


TALK = """A **bold** word, `code`, and a list:

- one
- \u05d4\u05e9\u05e4\u05d4 \u05d4\u05e2\u05d1\u05e8\u05d9\u05ea, \u65e5\u672c\u8a9e
- a_name-that_goes-on-""" + "without_any_space-" * 8 + """

```python
print("a line of code that is wider than a phone, which scrolls in its box", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
```"""
SCREENS = [(320, "dark"), (400, "dark"), (1400, "light")]  # widths and themes beside those of the fast tests


@pytest.mark.parametrize(
    ("width", "theme"),
    [(400, "light"), (1400, "dark"), *(pytest.param(*one, marks=pytest.mark.slow) for one in SCREENS)],
)
def test_it_fits_and_can_be_read(browser: Browser, server: Any, width: int, theme: str) -> None:
    """Empty, with the settings, with an answer, and with the markup of an answer and an error: nothing is cut or collides."""
    context = browser.new_context(viewport={"width": width, "height": 700}, color_scheme=theme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(server.url)
    assert page.locator("html").get_attribute("data-theme") == theme
    assert faults(page) == []
    page.get_by_role("button", name="Settings").click()
    assert faults(page) == [], "with the settings"
    say(page, "x" * 200)
    finished(page)
    page.evaluate("text => { render(document.querySelector('.turn.assistant .body'), text); }", TALK)
    page.evaluate("document.getElementById('log').append(element('p', { className: 'note fault' }, 'The answer broke off.'))")
    assert faults(page) == [], "with an answer"
    box = page.get_by_label("Your message").bounding_box()
    assert box
    assert box["y"] + box["height"] <= 700
    context.close()


def test_the_settings_leave_room_and_escape_closes_them(browser: Browser, server: Any) -> None:
    context = browser.new_context(viewport={"width": 400, "height": 700})
    page = context.new_page()
    page.goto(server.url)
    page.get_by_role("button", name="Settings").click()
    box = page.locator("#settings").bounding_box()
    assert box and box["height"] <= 0.56 * 700, "the conversation is seen below them"
    page.get_by_label("Seed").scroll_into_view_if_needed()
    assert page.get_by_label("Seed").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#settings").is_visible()
    assert page.get_by_role("button", name="Settings").get_attribute("aria-expanded") == "false"
    context.close()


def test_the_switch_between_the_models_of_a_run(page: Page, run_dir: Any, serving: Any) -> None:
    page.goto(serving(load_models(run_dir), ServerOptions()))
    page.get_by_label("Longest answer").evaluate("field => { field.value = 16; field.dispatchEvent(new Event('input')); }")
    page.get_by_label("Model", exact=True).select_option("talker-base")
    page.get_by_role("heading", name="Talk to talker-base").wait_for()
    assert "This is a base model" in page.locator("#pitch").inner_text()
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request.post_data_json["model"]) if request.method == "POST" else None)
    say(page, "Hello")
    finished(page)
    page.get_by_label("Model", exact=True).select_option("talker")
    page.get_by_role("heading", name="Talk to talker", exact=True).wait_for()
    assert page.locator(".turn").count() == 0, "each has a conversation of its own"
    assert asked == ["talker-base"]
