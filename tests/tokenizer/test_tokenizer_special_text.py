"""Text never becomes a special token, whatever the kind of the vocabulary and wherever the special tokens are in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmworks.tokenizer import Tokenizer, load
from lmworks.tokenizer.tokenizer_json import BYTE_OF

SPECIAL = ("<unk>", "<s>", "</s>", "[CLS]", "x")  # the last one is also a word and a letter
LETTERS = sorted({*"<unk></s>[CLS]x ab\u2581"})
SPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _merges(pieces: list[str]) -> tuple[list[str], list[list[str]]]:
    """Merges from the letters to each of the pieces, and the pieces on the way."""
    pairs = [[piece[:at], piece[at]] for piece in pieces for at in range(1, len(piece))]
    return [left + right for left, right in pairs], pairs


def _numbered(*pieces: str) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def _models() -> dict[str, dict[str, Any]]:
    reached, merges = _merges([*SPECIAL, "ax"])
    bpe = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "merges": merges,
           "vocab": _numbered(*SPECIAL, *BYTES, *LETTERS, *reached)}  # fmt: skip
    level = {"type": "BPE", "vocab": _numbered(*SPECIAL[:-1], *BYTE_OF, *reached), "merges": merges}
    unigram = [*((piece, 0.0) for piece in SPECIAL), *((byte, -20.0) for byte in BYTES), *((one, -5.0) for one in LETTERS if one != "x")]
    whole = {"unk_token": "<unk>", "vocab": _numbered(*SPECIAL, *LETTERS, *(f"##{one}" for one in LETTERS))}
    return {
        "bpe": bpe, "bpe without merges": bpe | {"merges": [], "ignore_merges": True}, "byte-level bpe": level,
        "byte-level bpe, whole words": level | {"ignore_merges": True},
        "unigram": {"type": "Unigram", "unk_id": 0, "byte_fallback": True, "vocab": [list(one) for one in unigram]},
        "wordpiece": whole | {"type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
        "wordlevel": whole | {"type": "WordLevel"},
    }  # fmt: skip


MODELS = _models()
SPLITS = {"byte-level bpe": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
          "wordpiece": {"type": "WhitespaceSplit"}, "wordlevel": {"type": "WhitespaceSplit"}}  # fmt: skip
DECODER = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
                                            {"type": "Fuse"}]}  # fmt: skip
DECODERS = {name: {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
            for name in ("byte-level bpe", "byte-level bpe, whole words")}  # fmt: skip
SPLITS["byte-level bpe, whole words"] = SPLITS["byte-level bpe"]


def _written(folder: Path, name: str) -> Tokenizer:
    model = MODELS[name]
    vocab = model["vocab"] if isinstance(model["vocab"], dict) else {piece: at for at, (piece, _) in enumerate(model["vocab"])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": vocab[text], "content": text} | flags for text in SPECIAL]
    spec = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "post_processor": None,
            "pre_tokenizer": SPLITS.get(name, SPACE), "decoder": DECODERS.get(name, DECODER), "model": model}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}))
    return load(folder)


@pytest.fixture(scope="module", params=list(MODELS))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    return request.param, _written(tmp_path_factory.mktemp("tokenizer"), request.param)


@given(parts=st.lists(st.sampled_from([*SPECIAL, "a", "b", " ", "ax", "é"]), max_size=8))
def test_text_never_becomes_a_special_token(written: tuple[str, Tokenizer], parts: list[str]) -> None:
    name, tokenizer = written
    text = "".join(parts)
    # a word that is not in the vocabulary is what the token of unknown words stands for
    never = set(tokenizer.special.values()) - ({tokenizer.special["<unk>"]} if name.startswith("word") else set())
    ids = tokenizer.encode(text)
    assert never.isdisjoint(ids)
    assert ids == tokenizer.encode_batch([text])[0].tolist()
    if not name.startswith("word"):
        found = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert found.lstrip() == text.lstrip(), "and nothing of it is lost"
        assert not any(one in text for one in SPECIAL[:-1]) or not never.isdisjoint(tokenizer.encode(text, allow_special=True))


def test_a_control_token_that_every_text_needs_is_text(tmp_path: Path) -> None:
    """Some take "!" of byte-level BPE for padding; without it no exclamation mark could be encoded."""
    tokenizer = _written(tmp_path, "byte-level bpe")
    assert "x" not in tokenizer.special and set(SPECIAL[:-1]) == set(tokenizer.special)
    assert [tokenizer.decode([one]) for one in tokenizer.encode("bx")] == ["b", "x"]


def test_an_end_of_text_in_a_message_ends_no_turn(tmp_path: Path) -> None:
    _written(tmp_path, "unigram")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    )
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a </s> b"}]
    tokenizer = load(tmp_path)
    ids, mask = tokenizer.encode_chat(said)
    assert [at for at, one in enumerate(ids) if one == tokenizer.eos_id] == [len(ids) - 1]
    assert mask[-1] and sum(mask) >= len("a</s>b")
