"""Rewriting against a real server on loopback: what is asked, what is kept, what is asked again, and what stops."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lmworks.corpus.document import Batch, Context, Document, Drop, Outcome, Variants
from lmworks.corpus.transform.steps import make_step
from lmworks.errors import UserError
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.schema.steps import Rewrite

PROMPT = "Say it shorter:\n\n{text}\n\nNo {braces} lost."


@dataclass
class Endpoint:
    """A small server that answers with the question in capitals, and can be made to fail."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def answer(self, request: Request, body: dict[str, Any]) -> JSONResponse:
        with self.lock:
            self.asked.append(body)
            self.keys.append(request.headers.get("authorization"))
            if self.failures:
                status = self.failures.pop(0)
                return JSONResponse({"error": {"message": f"told to fail with {status}"}}, status, {"retry-after-ms": "5"})
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(0.02)
        text = body["messages"][0]["content"].split("\n\n")[1]
        with self.lock:
            self.at_once -= 1
        finish = "length" if "LONG" in text else "stop"
        if "TOO MUCH" in text:
            return JSONResponse({"error": {"message": "this is\nmore than I take"}}, 400)
        content = "  " if "SILENT" in text else text.upper()
        message = {"role": "assistant", "content": content}
        choices = [{"index": 0, "finish_reason": finish, "message": message}]
        return JSONResponse({"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": choices})


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    from starlette.concurrency import run_in_threadpool

    state = Endpoint()

    async def chat(request: Request) -> JSONResponse:
        body = json.loads(await request.body())
        return await run_in_threadpool(state.answer, request, body)

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    state.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    yield state
    server.should_exit = True
    thread.join()


def node(endpoint: str, **more: Any) -> Rewrite:
    given = {"endpoint": endpoint, "model": "small", "prompt": PROMPT, "sources": ["web"], "cache": "answers", "concurrency": 4}
    return Rewrite.model_validate({**given, "retries": 3, **more})


def run(tmp_path: Path, node: Rewrite, texts: list[str], source: str = "web") -> list[Outcome]:
    made = Source(name=source, kind="text", path="x", license="test")
    step = make_step(node, Context(made, 0, tmp_path))
    documents = [
        Document(f"{source}/0/{number}", text, f"x:{number}", source, "web", "en", {"url": "u"}) for number, text in enumerate(texts)
    ]
    return list(step(Batch(documents)))


TEXTS = [f"text number {number} {{with}} braces" for number in range(30)]


def test_texts_come_back_rewritten_and_keep_where_they_are_from(endpoint: Endpoint, tmp_path: Path) -> None:
    outcomes = run(tmp_path, node(endpoint.url), TEXTS)
    assert [outcome.text for outcome in outcomes if isinstance(outcome, Document)] == [text.upper() for text in TEXTS]
    assert all(outcome.facts == {"url": "u", "rewritten_by": "small"} for outcome in outcomes)
    assert [outcome.origin for outcome in outcomes if isinstance(outcome, Document)] == [f"x:{number}" for number in range(30)]
    assert {body["messages"][0]["content"] for body in endpoint.asked} == {PROMPT.replace("{text}", text) for text in TEXTS}
    assert endpoint.asked[0]["temperature"] == 0.7 and endpoint.asked[0]["model"] == "small"
    assert 1 < endpoint.most_at_once <= 4


def test_variants_are_added_and_each_is_asked_for_once(endpoint: Endpoint, tmp_path: Path) -> None:
    first = run(tmp_path, node(endpoint.url, variants=3), TEXTS[:4])
    assert all(isinstance(outcome, Variants) for outcome in first) and len(endpoint.asked) == 12
    for text, outcome in zip(TEXTS, first, strict=False):
        assert isinstance(outcome, Variants) and outcome.document.text == text
        assert [one.text for one in outcome.made if isinstance(one, Document)] == [text.upper()] * 3
    assert run(tmp_path, node(endpoint.url, variants=3), TEXTS[:4]) == first and len(endpoint.asked) == 12
    (partly,) = run(tmp_path, node(endpoint.url, variants=1), ["LONG story"])
    assert isinstance(partly, Variants) and partly.document.text == "LONG story"
    assert [one.reason for one in partly.made if isinstance(one, Drop)] == ["rewrite_cut"]
    with pytest.raises(ValueError, match="raise temperature"):
        node(endpoint.url, variants=2, temperature=0)


def test_nothing_is_asked_twice(endpoint: Endpoint, tmp_path: Path) -> None:
    first = run(tmp_path, node(endpoint.url), [*TEXTS[:8], TEXTS[0]])
    assert len(endpoint.asked) == 8
    again = run(tmp_path, node("http://127.0.0.1:9/v1"), [*TEXTS[:8], TEXTS[0]])  # nobody listens there
    assert again == first
    run(tmp_path, node(endpoint.url), TEXTS[4:12])
    assert len(endpoint.asked) == 12
    run(tmp_path, node(endpoint.url, temperature=0.1), TEXTS[:1])
    run(tmp_path, node(endpoint.url, prompt="Otherwise:\n\n{text}\n\n."), TEXTS[:1])
    assert len(endpoint.asked) == 14


def test_a_stop_in_the_middle_keeps_what_was_answered(endpoint: Endpoint, tmp_path: Path) -> None:
    run(tmp_path, node(endpoint.url), TEXTS[:5])
    endpoint.failures = [500]
    with pytest.raises(UserError, match=r"has no answer from http\S+ \(.*the answers so far are cached in .*answers"):
        run(tmp_path, node(endpoint.url, retries=0, concurrency=1), TEXTS)
    kept = len(list((tmp_path / "answers").rglob("*.json")))
    asked = len(endpoint.asked)
    assert 5 <= kept < 30
    run(tmp_path, node(endpoint.url), TEXTS)
    assert len(endpoint.asked) == asked + 30 - kept


def test_what_fails_for_now_is_tried_again(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.failures = [429, 503, 500]
    outcomes = run(tmp_path, node(endpoint.url, concurrency=1), TEXTS[:2])
    assert all(isinstance(outcome, Document) for outcome in outcomes) and len(endpoint.asked) == 5


def test_what_cannot_be_rewritten_is_dropped_with_its_reason(endpoint: Endpoint, tmp_path: Path) -> None:
    outcomes = run(tmp_path, node(endpoint.url), ["LONG story", "SILENT night", "TOO MUCH text", "fine"])
    assert [outcome.reason for outcome in outcomes if isinstance(outcome, Drop)] == ["rewrite_cut", "rewrite_empty", "rewrite_refused"]
    assert isinstance(outcomes[2], Drop) and "this is more than I take" in outcomes[2].detail.replace("\\n", " ")
    assert isinstance(outcomes[3], Document)


def test_a_wrong_key_or_nobody_there_stops_in_one_line(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint.failures = [401]
    with pytest.raises(UserError, match="told to fail with 401") as caught:
        run(tmp_path, node(endpoint.url, concurrency=1), TEXTS[:3])
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="Connection error"):
        run(tmp_path, node("http://127.0.0.1:9/v1", retries=0), TEXTS[:3])
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(UserError, match=r"needs a key for https://example\.org/v1: put it into the environment variable SOME_KEY"):
        run(tmp_path, node("https://example.org/v1", api_key_env="SOME_KEY"), TEXTS)


def test_the_key_comes_from_the_environment_and_is_written_nowhere(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    run(tmp_path, node(endpoint.url, api_key_env="SOME_KEY"), TEXTS[:2])
    assert endpoint.keys == ["Bearer sk-secret"] * 2
    assert not any("sk-secret" in path.read_text() for path in (tmp_path / "answers").rglob("*.json"))


def test_other_sources_pass_untouched(endpoint: Endpoint, tmp_path: Path) -> None:
    outcomes = run(tmp_path, node(endpoint.url), TEXTS[:3], source="books")
    assert [outcome.text for outcome in outcomes if isinstance(outcome, Document)] == TEXTS[:3] and not endpoint.asked


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("{step: rewrite, model: m, prompt: 'x {text}', sources: [prose]}", "corpus.steps.rewrite.endpoint: is missing"),
        ("{step: rewrite, endpoint: example, model: m, prompt: 'x {text}', sources: [prose]}", "corpus.steps.rewrite.endpoint"),
        ("{step: rewrite, endpoint: 'http://h/v1', model: m, prompt: x, sources: [prose]}", "write {text} in it"),
        ("{step: rewrite, endpoint: 'http://h/v1', model: m, prompt: 'x {text}'}", "corpus.steps.rewrite.sources: is missing"),
        ("{step: rewrite, endpoint: 'http://h/v1', model: m, prompt: 'x {text}', sources: [prise]}", "did you mean 'prose'?"),
    ],
)
def test_a_recipe_that_does_not_say_enough_is_refused(tmp_path: Path, step: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        f"name: r\nsize: 1M\ncorpus:\n  sources: [{{name: prose, kind: text, path: a, license: CC0-1.0}}]\n  steps: [{step}]\n"
    )
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    assert message in str(caught.value)
