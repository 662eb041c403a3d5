from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_texts import ARTICLE, library

from lmworks.errors import UserError
from lmworks.tokenizer import StreamDecoder, Tokenizer, load, special
from lmworks.tokenizer import text_tokenizer as module

# What the split rule looks at: case, contractions, digits, kinds of space, line ends, marks, scripts, joined emoji.
TRICKY = ["'S", "'ll", "'ſ", "\u0130", "1", "٣", "²", "Ⅷ", " ", "  ",
          "\t", "\u00a0", "\u3000", "\u200b", "\r\n", "\n", "\x85", "\u2028", "\u0300",
          "é", "e\u0301", "ß", "人", "自由", "가", "ا", "ह", "ि", "👩‍👧",
          "🇩🇪", "!", "==", "__", "-", "a", "the", "The", "def ", "self.", "\x00", "\U0010ffff",
          "<|user|>", "<|", "|>", "[MASK]", "</think>"]
texts = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(TRICKY), max_size=25).map("".join),
                  st.text(alphabet="ab ’'sT1\n", max_size=60), st.sampled_from([*ARTICLE.values()]))


def reference_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """`tokenizers`, with nothing taken for special."""
    return tokenizer._reference_for_text.encode(text, add_special_tokens=False).ids


@settings(max_examples=600, deadline=None)
@given(text=texts)
def test_ids_are_those_of_tokenizers(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference_ids(tokenizer, text)
    assert ids == tokenizer.encode_batch([text])[0].tolist()
    assert tokenizer.encode(text, allow_special=True) == tokenizer.reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.special.values())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["a{0}b {0}", "1{0}2", "'{0}!{0}\n", "a{0}{0}1", " {0}  {0}b"])
def test_every_character_is_split_as_tokenizers_does(tokenizer: Tokenizer, form: str) -> None:
    """The two libraries have regex engines with their own Unicode tables."""
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    for start in range(0, len(characters), 4096):
        lines = [form.format(char) for char in characters[start : start + 4096]]
        theirs = tokenizer._reference_for_text.encode_batch(lines, add_special_tokens=False)
        assert [ids.tolist() for ids in tokenizer.encode_batch(lines, 1)] == [item.ids for item in theirs]


def test_ids_are_those_of_tokenizers_on_real_text(tokenizer: Tokenizer) -> None:
    documents = [*library("typing", "tokenize", "html/entities", "encodings/cp1253", "turtle"), *ARTICLE.values()]
    encoded = tokenizer.encode_batch(documents, threads=2)
    for text, ids in zip(documents, encoded, strict=True):
        assert ids.dtype == np.uint32
        assert ids.flags.writeable
        assert ids.tolist() == tokenizer.encode(text) == reference_ids(tokenizer, text)
        assert tokenizer.decode(ids) == text
    assert sum(map(len, documents)) > 3 * sum(map(len, encoded)) / 2  # it does compress


def test_threads_change_nothing(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = library("typing", "ast", "copy")
    monkeypatch.setattr(module, "_PARALLEL_BYTES", 0)
    for one, two in zip(tokenizer.encode_batch(documents, threads=1), tokenizer.encode_batch(documents, threads=3), strict=True):
        np.testing.assert_array_equal(one, two)
    assert tokenizer.encode_batch([]) == []


ABSURD = {"spaces": " " * 1_100_000 + "x <|user|>", "mixed space": "\t \u00a0" * 40_000 + "x", "letters": "a" * 200_000,
          "lines": "\n" * 200_000, "digits": "1" * 200_000}


@pytest.mark.parametrize("text", ABSURD.values(), ids=ABSURD.keys())
def test_absurd_documents_are_encoded(tokenizer: Tokenizer, text: str) -> None:
    """A million spaces end tiktoken's regex engine with a panic; they go another way, to the same ids."""
    ids = tokenizer.encode(text)
    assert ids == tokenizer.encode_batch([text])[0].tolist()
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.special.values())


def test_long_spaces_have_the_same_ids_either_way(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "word" + " " * 120_000 + "<|user|> x\n"
    other_way = tokenizer.encode(text)
    monkeypatch.setattr(Tokenizer, "_needs_reference", staticmethod(lambda text: False))
    assert tokenizer.encode(text) == other_way


def test_the_search_for_long_spaces_takes_each_run_once(tokenizer: Tokenizer) -> None:
    """Runs that are a little too short were searched again from each of their spaces: half a minute for these two."""
    begin = time.process_time()
    assert not tokenizer._needs_reference((" " * 99_999 + "x") * 2)
    assert tokenizer._needs_reference((" " * 99_999 + "x") + "\t" * 100_000)
    assert time.process_time() - begin < 10


def test_special_tokens_come_only_when_allowed(tokenizer: Tokenizer) -> None:
    for name, token in tokenizer.special.items():
        assert token not in tokenizer.encode(f"a{name}b")
        assert tokenizer.encode(f"a{name}b", allow_special=True) == [*tokenizer.encode("a"), token, *tokenizer.encode("b")]
        assert tokenizer.decode([token]) == name
    end, think = tokenizer.special["<|endoftext|>"], tokenizer.special["<think>"]
    assert tokenizer.decode([end, think], skip_special=True) == "<think>"
    assert tokenizer.eos_id == tokenizer.pad_id == end
    assert [tokenizer.decode([token]) for token in tokenizer.stop_ids] == ["<|endoftext|>", "<|user|>", "<|observation|>"]


def test_the_longest_special_token_is_taken(tokenizer: Tokenizer) -> None:
    other = copy.copy(tokenizer)
    user, end = tokenizer.special["<|user|>"], tokenizer.special["<|endoftext|>"]
    other.special = {"<|user|>": user, "<|user|>s": end}
    other._index_special()
    assert other.encode("<|user|>s<|user|>", allow_special=True) == [end, user]


def test_foreign_ids_are_refused(tokenizer: Tokenizer) -> None:
    for token in (-1, 1024, 10**9):
        with pytest.raises(UserError, match="outside the vocabulary of 1024"):
            tokenizer.decode([token])


def test_lengths_in_bytes_add_up(tokenizer: Tokenizer) -> None:
    text = "".join(ARTICLE.values())
    assert tokenizer.byte_lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert tokenizer.byte_lengths[tokenizer.eos_id] == 0


@settings(max_examples=200, deadline=None)
@given(ids=st.one_of(texts, st.lists(st.integers(0, 1023), max_size=30)))
def test_streaming_is_decoding_and_never_half_a_character(tokenizer: Tokenizer, ids: str | list[int]) -> None:
    valid = isinstance(ids, str)
    ids = tokenizer.encode(ids) if isinstance(ids, str) else ids
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(token) for token in ids]
    last = decoder.finish()
    assert "".join(pieces) + last == tokenizer.decode(ids)
    if valid:
        assert last == ""


def test_streaming_keeps_back_an_unfinished_character(tokenizer: Tokenizer) -> None:
    ids = [tokenizer._bpe.ranks[bytes([byte])] for byte in "é👧".encode()]
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(token) for token in ids] == ["", "é", "", "", "", "👧"]
    assert decoder.finish() == ""
    decoder = StreamDecoder(tokenizer)
    assert (decoder.push(ids[2]), decoder.finish()) == ("", "\ufffd")
    skipping = StreamDecoder(tokenizer, skip_special=True)
    assert skipping.push(tokenizer.eos_id) + skipping.push(tokenizer.special["<tool_call>"]) == "<tool_call>"


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json does not exist"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(UserError, match="not readable JSON"):
        load(tmp_path)


def test_importing_the_room_is_light() -> None:
    import subprocess

    heavy = {"torch", "tiktoken", "tokenizers", "jinja2", "transformers", "pyarrow"}
    code = f"import sys, lmworks.tokenizer; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True).stdout.strip() == "[]"


def test_split_is_glm4s_letter_for_letter() -> None:
    """llama.cpp chooses its pre-tokenizer by name, so another regex would silently give it other ids than ours."""
    assert special.SPLIT == (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                             r"|\s*[\r\n]+|\s+(?!\S)|\s+")
