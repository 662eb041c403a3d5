"""The kind over characters: rare ones as bytes, each digit alone, and no text that does not come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_texts import ARTICLE, library, write_source

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer import StreamDecoder, Tokenizer, load
from lmworks.tokenizer.train import train


@pytest.fixture(scope="module")
def folder(recipe: Recipe, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentencepiece")
    options = recipe.tokenizer.model_copy(update={"kind": "sentencepiece", "vocab_size": 1536})
    report = train(recipe.model_copy(update={"tokenizer": options}), corpus, folder)
    assert (report["kind"], report["reserved_for_lack_of_text"]) == ("sentencepiece", 0)
    assert not any(row["round_trip_failures"] for row in report["evaluation"])
    return folder


@pytest.fixture(scope="module")
def pieces(folder: Path) -> Tokenizer:
    return load(folder)


@pytest.fixture(scope="module")
def foreign(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


hard = ["▁", "<0x41>", "<0x", "12345", "٣", " ", "  ", "\n", "人", "👩‍👧", "\U0010ffff", "\x00", "a", "the", "<|user|>", "\u0301"]
texts = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(hard), max_size=25).map("".join), st.sampled_from([*ARTICLE.values()]))


@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_every_text_comes_back_and_ids_are_those_of_transformers(pieces: Tokenizer, foreign: Any, text: str) -> None:
    ids = pieces.encode(text)
    assert pieces.decode(ids) == text
    assert ids == pieces.encode_batch([text])[0].tolist()
    assert not set(ids) & set(pieces.special.values())
    marked = pieces.encode(text, allow_special=True)
    assert marked == foreign(text, add_special_tokens=False)["input_ids"]
    assert foreign.decode(ids) == text
    stream = StreamDecoder(pieces)
    assert "".join(map(stream.push, ids)) + stream.finish() == text


def test_digits_stand_alone_and_rare_characters_are_bytes(pieces: Tokenizer) -> None:
    assert [pieces.decode([token]) for token in pieces.encode("a12345b")] == ["a", "1", "2", "3", "4", "5", "b"]
    ids = pieces.encode("\U0010fffd")
    assert [pieces.token_bytes(token) for token in ids] == [bytes([byte]) for byte in "\U0010fffd".encode()]
    assert max(ids) < 256
    assert pieces.encode("a\ud800b") == pieces.encode("a\ufffdb")  # half a surrogate pair, which JSON may hold
    assert len(pieces.encode("return self")) <= 3
    assert pieces.byte_lengths[ids].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(("kind", "tokens"), [("sentencepiece", 4), ("bytes", 2)])
def test_a_number_that_is_everywhere_is_still_cut_into_digits(recipe: Recipe, tmp_path: Path, kind: str, tokens: int) -> None:
    write_source(tmp_path, "years", ["2024 " * 200])
    write_source(tmp_path, "years", ["2024"], "validation")
    options = recipe.tokenizer.model_copy(update={"kind": kind})
    train(recipe.model_copy(update={"tokenizer": options}), tmp_path, tmp_path / "out")
    assert len(load(tmp_path / "out").encode("2024")) == tokens


def test_real_text_in_a_batch(pieces: Tokenizer) -> None:
    documents = [*library("typing", "tokenize", "html/entities"), *ARTICLE.values()]
    for ids, text in zip(pieces.encode_batch(documents, threads=2), documents, strict=True):
        assert ids.dtype == np.uint32
        assert pieces.decode(ids.tolist()) == text
        assert int(pieces.byte_lengths[ids].sum()) == len(text.encode())


def test_chats_work_as_ever(pieces: Tokenizer, foreign: Any) -> None:
    messages = [{"role": "user", "content": "Hi <|user|> 12"}, {"role": "assistant", "content": "人 ▁ Hello"}]
    ids, mask = pieces.encode_chat(messages)
    assert pieces.decode(ids) == pieces.apply_chat(messages) == foreign.apply_chat_template(messages, tokenize=False)
    assert pieces.decode([token for token, on in zip(ids, mask, strict=True) if on]) == "人 ▁ Hello<|endoftext|>"


def test_it_is_taken_over_and_others_of_its_kind_are_refused(folder: Path, recipe: Recipe, corpus: Path, tmp_path: Path) -> None:
    def adopt(path: Path) -> None:
        options = recipe.tokenizer.model_copy(update={"path": str(path), "vocab_size": 1600})
        train(recipe.model_copy(update={"tokenizer": options}), corpus, tmp_path / "out")

    adopt(folder)
    assert load(tmp_path / "out").encode("return self 人") == load(folder).encode("return self 人")
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
    (tmp_path / "llama.json").write_text(json.dumps(spec))
    with pytest.raises(UserError, match="byte_fallback is set, and the pre-tokenizer is not one Split"):
        adopt(tmp_path / "llama.json")


def test_too_few_entries_are_said_in_one_line(recipe: Recipe, corpus: Path, tmp_path: Path) -> None:
    options = recipe.tokenizer.model_copy(update={"kind": "sentencepiece", "vocab_size": 330})
    with pytest.raises(UserError, match="set it to at least 386"):
        train(recipe.model_copy(update={"tokenizer": options}), corpus, tmp_path)
