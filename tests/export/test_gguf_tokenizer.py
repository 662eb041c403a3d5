"""Tokenizers of published kinds in GGUF: the rule that is chosen, what is refused, and in llama.cpp itself the ids of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ask, engine
from tokenizer_kinds import KINDS, Published, texts, write_kind

from lmworks.errors import UserError
from lmworks.export.gguf import write_gguf
from lmworks.export.gguf_tokenizer import find_rule
from lmworks.model import Transformer
from lmworks.recipe.schema.model import Model
from lmworks.tokenizer import load

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'lmworks[export]'")


def file_with(folder: Path, path: Path) -> Any:
    """A GGUF file of a model of zeros with the tokenizer in `folder`; returns the tokenizer."""
    tokenizer = load(folder)
    model = Transformer(Model(vocab_size=tokenizer.vocab_size + 3, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                              num_key_value_heads=2, head_dim=16, intermediate_size=32))  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    write_gguf(model, tokenizer, path, torch.float32, "zeros")
    return tokenizer


@pytest.mark.parametrize("name", KINDS)
def test_the_rule_of_each_kind(tmp_path: Path, name: str) -> None:
    kind = write_kind(tmp_path, name)
    tokenizer = file_with(tmp_path, tmp_path / "model.gguf")
    rule = find_rule(tokenizer)
    assert rule.pre == kind.rule and rule.model == ("llama" if kind.rule == "default" else "gpt2")
    assert bool(rule.notes) == (not kind.exact or bool(kind.normalizer))
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    found = {key: fields[f"tokenizer.ggml.{key}"].contents() for key in ("model", "pre", "tokens", "token_type")}
    assert (found["model"], found["pre"], len(found["tokens"])) == (rule.model, rule.pre, tokenizer.vocab_size + 3)
    types = dict(zip(found["tokens"], found["token_type"], strict=True))
    assert types["</s>"] == gguf.TokenType.CONTROL and found["token_type"][-3:] == [gguf.TokenType.UNUSED] * 3
    if rule.model == "llama":
        scores = fields["tokenizer.ggml.scores"].contents()
        assert types["<0x0A>"] == gguf.TokenType.BYTE and scores == sorted(scores, reverse=True)
        assert fields["tokenizer.ggml.add_space_prefix"].contents() == (name in ("llama2", "mistral", "mistral-first"))


CHANGES: list[tuple[str, Any, str]] = [
    ("gpt2", lambda spec: spec["model"].update(type="Unigram"), "its model is Unigram"),
    ("gpt2", lambda spec: spec["model"].update(type="WordPiece"), "its model is WordPiece"),
    ("gpt2", lambda spec: spec.update(normalizer={"type": "Lowercase"}), "its normalizer Lowercase changes text"),
    ("gpt2", lambda spec: spec["pre_tokenizer"].update(add_prefix_space=True), "its pre-tokenizer has ByteLevel with .*add_prefix_space"),
    ("gpt2", lambda spec: spec["added_tokens"][3].update(lstrip=True), r"its token '<\|im_start\|>' has lstrip"),
    ("gpt2", lambda spec: spec["model"].update(ignore_merges=True), "ignore_merges is True, and .*gpt-2 is for the other one"),
    ("smollm", lambda spec: spec["pre_tokenizer"]["pretokenizers"][0].update(individual_digits=False), r"it splits text by \\p{N}\+ then"),
    ("llama3", lambda spec: spec["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Punctuation"}), "Punctuation"),
    ("qwen2", lambda spec: spec["pre_tokenizer"]["pretokenizers"][0].update(invert=True), "its pre-tokenizer has Split"),
    ("mistral", lambda spec: spec["pre_tokenizer"].update(replacement="_"), "of SentencePiece's kind with the normalizer"),
    ("gemma", lambda spec: spec["normalizer"].update(content="_"), "of SentencePiece's kind with the normalizer Replace"),
    ("gemma", lambda spec: spec["model"]["vocab"].update({"a\nb": len(spec["model"]["vocab"])}), "some of its pieces hold line ends"),
    ("llama2", lambda spec: spec["model"]["vocab"].update({"qzq": len(spec["model"]["vocab"])}), "and it puts a space before text"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "reason"), CHANGES, ids=[reason[:30] for *_, reason in CHANGES])
def test_what_no_rule_expresses_is_refused_by_name(tmp_path: Path, name: str, change: Any, reason: str) -> None:
    write_kind(tmp_path, name)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer = load(tmp_path)
    change(spec)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UserError, match=rf"tokenizer\.json: .*{reason}.*llama\.cpp has no tokenizer; set export\.gguf=false"):
        find_rule(tokenizer)


def _with_added(folder: Path, kind: str, *texts: str, **flags: bool) -> Any:
    """A tokenizer with text as added tokens, as `add_tokens` of transformers makes them."""
    write_kind(folder, kind)
    spec = json.loads((folder / "tokenizer.json").read_text())
    common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False} | flags
    size = max(*spec["model"]["vocab"].values(), *(token["id"] for token in spec["added_tokens"])) + 1
    spec["added_tokens"] += [{"id": size + number, "content": text} | common for number, text in enumerate(texts)]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return load(folder)


@pytest.mark.parametrize(("kind", "text", "found"), [("llama2", "foobar", "▁foobar"), ("gemma", "▁two", "▁two"), ("qwen2", "e\u0301", "é")])
def test_an_added_token_that_other_text_becomes_is_refused(tmp_path: Path, kind: str, text: str, found: str) -> None:
    """llama.cpp looks for it in text as it is."""
    tokenizer = _with_added(tmp_path, kind, text)
    with pytest.raises(UserError, match=f"its token {text!r} is found in normalized text, as {found!r}"):
        find_rule(tokenizer)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("llama2", {"normalized": False}), ("llama2", {"special": True}), ("gemma", {}), ("qwen2", {}), ("mistral", {}), ("gpt2", {})],
)
def test_an_added_token_that_only_its_own_text_becomes_is_taken(tmp_path: Path, kind: str, flags: dict[str, bool]) -> None:
    bare = write_kind(tmp_path / "bare", kind)
    tokenizer = _with_added(tmp_path / "more", kind, "foobar", "▁zwei" if kind == "qwen2" else "zwei", **flags)
    assert find_rule(tokenizer) == find_rule(load(tmp_path / "bare")) and find_rule(tokenizer).pre == bare.rule


def test_notes_tell_of_text_beside_added_tokens(tmp_path: Path) -> None:
    assert find_rule(_with_added(tmp_path / "1", "gemma", "naïve x")).notes == (
        "text with ▁ in place of a space of its token 'naïve x' gets other ids",
    )
    assert find_rule(_with_added(tmp_path / "2", "mistral")).notes == (
        "text that begins with a space, also behind a special or added token, gets a second one",
    )
    assert find_rule(_with_added(tmp_path / "3", "mistral-first")).notes == (
        "text behind a special or added token gets a space before it, and text that begins with a space a second one",
    )


def test_a_spelling_of_the_same_pattern_is_the_same_rule(tmp_path: Path) -> None:
    write_kind(tmp_path, "llama3")
    text = (tmp_path / "tokenizer.json").read_text()
    spelled = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    (tmp_path / "tokenizer.json").write_text(text.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", spelled))
    assert spelled in (tmp_path / "tokenizer.json").read_text() and find_rule(load(tmp_path)).pre == "llama-bpe"


def explained(kind: Published, text: str) -> bool:
    """Whether the notes of the rule say that llama.cpp gives this text other ids."""
    import unicodedata

    marks = any(unicodedata.category(char).startswith("M") for char in text)
    if kind.normalizer:
        return unicodedata.normalize("NFC", text) != text
    if kind.rule in ("tekken", "gpt-4o"):
        return marks or any(ord(char) > 127 and char.isalpha() for char in text)
    return kind.spaces is not None and (text[:1] == " " or any(name in text for name in ("<unk>", "<s>", "</s>", "<|im_")))


@pytest.mark.slow
@pytest.mark.needs("llama")
@pytest.mark.parametrize("name", KINDS)
def test_llama_cpp_gives_the_ids_of_transformers(tmp_path: Path, name: str) -> None:
    """400 texts of digits, spaces, scripts, marks, control characters and special tokens."""
    import transformers

    kind = write_kind(tmp_path, name)
    asked = texts(file_with(tmp_path, tmp_path / "model.gguf"))
    python, library = engine("LMWORKS_LLAMA_PYTHON"), engine("LMWORKS_LLAMA_SERVER").parent
    question = {"model": str(tmp_path / "model.gguf"), "texts": asked}
    found = ask(python, "tokenize_llama.py", question, LLAMA_CPP_LIB_PATH=str(library))["ids"]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    unequal = [text for text, ids in zip(asked, found, strict=True) if ids != theirs(text, add_special_tokens=False)["input_ids"]]
    assert len(asked) >= 400 and not [text for text in unequal if (kind.exact and not kind.normalizer) or not explained(kind, text)]
