"""The sampling options of chats are declared once: by the model's generation_config.json, or by `SAMPLING`, which exports state there."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from lmworks.errors import UserError
from lmworks.inference.generate import SAMPLING
from lmworks.serve.chat import Conversation
from lmworks.serve.engine import Engine
from lmworks.serve.models import Models, read_sampling
from lmworks.serve.server import page


@pytest.mark.parametrize(("given", "expected"), [
    (None, SAMPLING), ({"eos_token_id": 2}, SAMPLING), ({"do_sample": True} | SAMPLING, SAMPLING),
    ({"do_sample": False, "temperature": 0.6}, {"temperature": 0}), ({"top_k": 20, "temperature": None}, {"temperature": 1, "top_k": 20}),
    ({"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05}, {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05}),
])  # fmt: skip
def test_what_a_model_states(tmp_path: Path, given: dict | None, expected: dict) -> None:
    path = tmp_path / "generation_config.json"
    if given is not None:
        path.write_text(json.dumps(given))
    assert read_sampling(path) == expected


@pytest.mark.parametrize("text", [
    "[]", "{", '{"temperature": "hot"}', '{"top_p": 7}', '{"min_p": true}', '{"temperature": NaN}', "[" * 9999,
])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"generation_config\.json"):
        read_sampling(path)


def test_terminal_and_page_take_the_options_of_the_model(engine: Engine) -> None:
    engine.sampling = {"temperature": 0.6, "top_k": 20, "min_p": 0.02}
    asked = []
    honest = engine.submit
    engine.submit = lambda request, emit: (asked.append(request.options), honest(request, emit))[1]  # type: ignore[method-assign]
    for options in ({}, {"temperature": 0.0, "min_p": 0.5}):
        list(Conversation(engine, max_tokens=2, **options).ask("Hello"))  # type: ignore[arg-type]
    assert [(one.temperature, one.top_k, one.min_p) for one in asked] == [(0.6, 20, 0.02), (0.0, 20, 0.5)]
    text, _ = page(Models(engine))
    (about,) = re.findall(r'data-about="([^"]*)"', text)
    assert json.loads(html.unescape(about))["sampling"] == engine.sampling
    assert "...about.sampling" in text
    assert "about.sampling.temperature" in text
