"""Thoughts and answers of a set: what is trained is what the server asks for and the model writes, as transformers renders it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_chat_data import documents
from test_row_forms import jsonl, trained, tuned

from base_models import write_tokenizer
from lmworks.tokenizer import Tokenizer, load

THOUGHT = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3", "reasoning_content": "1 and 2"}]
PLAIN = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes"}]


@pytest.fixture(scope="module", params=["qwen", "glm"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    write_tokenizer(made, request.param)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load(folder)


def test_each_answer_is_rendered_as_the_server_asks(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """With `answers: each` and `empty: prompt`, prompt and answer are those of `apply_chat_template`, with and without thinking."""
    import transformers

    peer = transformers.AutoTokenizer.from_pretrained(folder)
    path = jsonl(tmp_path / "a.jsonl", {"messages": [*THOUGHT, *PLAIN]}, {"messages": PLAIN})
    tuned(tokenizer, path, tmp_path / "out", answers="each", thoughts={"empty": "prompt"})
    found = {tuple(ids): mask for split in ("train", "validation") for ids, mask in documents(tmp_path / "out" / split / "mine")}
    for messages, thinking in (([*THOUGHT], None), ([*THOUGHT, *PLAIN], False), (PLAIN, False)):
        options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        prompt = peer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=False, **options)
        whole = list(peer.apply_chat_template(messages, tokenize=True, return_dict=False))
        ids = next(one for one in found if list(one[: len(whole)]) == whole)
        assert list(ids[: len(prompt)]) == list(prompt) == tokenizer.encode_chat(messages[:-1], None, True, thinking)[0]
        mask = [bool(one) for one in found[ids]]
        assert not any(mask[: len(prompt)]) and mask[len(prompt)], "the answer begins where the prompt ends"


def test_thoughts_are_not_trained_where_that_is_said(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"messages": THOUGHT})
    (runs,) = trained(tokenizer, path, tmp_path / "yes")
    assert len(runs) == 1 and "1 and 2" in runs[0]
    (runs,) = trained(tokenizer, path, tmp_path / "no", thoughts={"train": False})
    assert "1 and 2" not in "".join(runs) and runs[-1].endswith(("3<|im_end|>", "3<|endoftext|>", "3"))
    inline = [THOUGHT[0], {"role": "assistant", "content": "<think>\n1 and 2\n</think>\n\n3"}]
    (runs,) = trained(tokenizer, jsonl(tmp_path / "b.jsonl", {"messages": inline}), tmp_path / "inline", thoughts={"train": False})
    assert "1 and 2" not in "".join(runs) and "3" in runs[-1]


def test_thoughts_of_earlier_answers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The templates leave them out, which is counted; kept, they stand in the text; dropped, the last answer keeps its own."""
    path = jsonl(tmp_path / "a.jsonl", {"messages": [*THOUGHT, *PLAIN]})
    body = tuned(tokenizer, path, tmp_path / "template")
    assert body["noted"]["thoughts that the chat template leaves out"] == 1
    (runs,) = trained(tokenizer, path, tmp_path / "keep", thoughts={"history": "keep"})
    assert "1 and 2" in runs[0]
    twice = jsonl(tmp_path / "b.jsonl", {"messages": [*PLAIN, *THOUGHT]})
    (runs,) = trained(tokenizer, twice, tmp_path / "drop", thoughts={"history": "drop"})
    assert "1 and 2" in runs[-1]


def test_the_last_answer_only_and_empty_answers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"messages": [*PLAIN, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]})
    (runs,) = trained(tokenizer, path, tmp_path / "last", answers="last")
    assert len(runs) == 1 and "So." in runs[0] and "Yes" not in runs[0]
    silent = jsonl(tmp_path / "b.jsonl", {"messages": [*PLAIN, PLAIN[0], {"role": "assistant", "content": " "}]})
    (runs,) = trained(tokenizer, silent, tmp_path / "omit")
    assert len(runs) == 1 and "Yes" in runs[0]
    assert tuned(tokenizer, silent, tmp_path / "o")["noted"]["empty answers, not trained"] == 1
    (runs,) = trained(tokenizer, silent, tmp_path / "train", empty_answers="train")
    assert len(runs) == 2
    assert json.loads((tmp_path / "train" / "manifest.json").read_text())["data"]["mine"]["left_out"] == {}
