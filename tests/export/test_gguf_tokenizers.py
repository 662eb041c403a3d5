"""Tokenizers made of GGUF files: the ids of the tokenizer that was written, and on the real model those of llama.cpp for every rule."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ask, engine

from base_models import KINDS, write_model, write_tokenizer
from lmworks.errors import UserError
from lmworks.export.gguf import write_gguf
from lmworks.io.files import read_json, write_json
from lmworks.recipe.gguf_header import read_header
from lmworks.recipe.gguf_model import tokenizer_file
from lmworks.recipe.gguf_tokenizer import SPLITS, files_of_tokenizer
from lmworks.recipe.weights import find_weights
from lmworks.tokenizer import load
from lmworks.weights.huggingface import read_model
from lmworks.weights.names import to_huggingface
from lmworks.weights.open import open_model
from smollm2 import gguf_file

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'lmworks[export]'")

TEXTS = [
    "Hello world", "In 1984, 12345 people paid $1,234.56!", "  leading  spaces   and\ttabs\n\n\nnewlines \r\n end ", "1", "12", "12345678",
    "naïve café ÉCOLE 東京 こんにちは 한국어 हिन्दी العربية", "don't DON'T it'LL we've", "def f(x):\n    return x**2 # comment\n",
    "🙂🙃👨\u200d👩\u200d👧 emoji", "x²+½ Ⅷ ٣٤٥ 一二三", "a\u0301 decomposed e\u0301", "", "   ", "\n", "https://example.com/a?b=c&d=1",
    "ALLCAPS camelCase snake_case kebab-case", "Привет мир ΑΒΓ",
]  # fmt: skip
MARKED = "<|im_start|>user\nhi<|im_end|>"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))


def _varied() -> list[str]:
    """Texts whose pieces are cut in many places."""
    drawn, letters = random.Random(1), "abcABC 019,.!?'\n\t-_/é東한ह🙂  "
    return [*TEXTS, *("".join(drawn.choice(letters) for _ in range(40)) for _ in range(40))]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_tokenizer_that_was_written(tmp_path: Path, kind: str) -> None:
    write_tokenizer(tmp_path / "original", kind)
    path = tmp_path / "original" / "tokenizer.json"
    spec = read_json(path)
    if "prepend_scheme" in spec["pre_tokenizer"]:  # that a space comes before the first word only, a GGUF file cannot say
        write_json(path, spec | {"pre_tokenizer": spec["pre_tokenizer"] | {"prepend_scheme": "never"}})
    write_model(tmp_path / "original", 448)
    original = load(tmp_path / "original")
    try:
        write_gguf(read_model(tmp_path / "original"), original, tmp_path / "model.gguf", torch.float32, "tiny")
    except UserError as error:
        pytest.skip(f"it cannot be written: {error}")
    opened = open_model(tmp_path / "model.gguf").tokenizer
    for text in _varied():
        if kind != "qwen" or "\u0301" not in text:  # a file does not say that text is composed
            assert opened.encode(text) == original.encode(text), text
    assert set(opened.stop_ids) == set(original.stop_ids)
    chat = [{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "It is 3."}]
    assert opened.encode_chat(chat) == original.encode_chat(chat)


def _metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary of three digits, their pairs, and a control token."""
    from lmworks.tokenizer.tokenizer_json import BYTE_OF

    bytes_ = sorted(BYTE_OF, key=lambda char: BYTE_OF[char])
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*bytes_, "12", "34", "1234", "<end>"],
        "tokenizer.ggml.token_type": [1] * 259 + [3], "tokenizer.ggml.merges": ["1 2", "3 4", "12 34"], "tokenizer.ggml.eos_token_id": 259,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("pre", "pieces"), [("smollm", 4), ("gpt-2", 1), ("qwen2", 4), ("llama-bpe", 3), ("falcon", 3), ("deepseek-v3", 3)]
)
def test_digits_are_split_by_the_rule_of_the_file(pre: str, pieces: int) -> None:
    import tokenizers

    found = tokenizers.Tokenizer.from_str(files_of_tokenizer(_metadata(pre=pre))["tokenizer.json"]).encode("1234")
    assert len(found.ids) == pieces, found.tokens


def _sentencepiece(**changes: Any) -> dict[str, Any]:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a", "abb", "bb"]
    kinds = [6] * 256 + [2, 3, 3] + [1] * 7
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -1.0, -2.0, -3.0, -4.0]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.unknown_token_id": 256,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}  # fmt: skip


def test_scores_become_merges() -> None:
    import tokenizers

    found = tokenizers.Tokenizer.from_str(files_of_tokenizer(_sentencepiece())["tokenizer.json"])
    assert found.encode("abb").tokens == ["<s>", "\u2581", "abb"], "ab has the highest score, then abb; a space comes before the text"
    metadata = _sentencepiece(tokens=[*_sentencepiece()["tokenizer.ggml.tokens"], "\u2581\u2581", "\u2581\u2581\u2581\u2581"],
                              token_type=[6] * 256 + [2, 3, 3] + [1] * 9,
                              scores=[*_sentencepiece()["tokenizer.ggml.scores"], -1e9, -1e9])  # fmt: skip
    of_llama = tokenizers.Tokenizer.from_str(files_of_tokenizer(metadata)["tokenizer.json"])
    assert of_llama.encode("    b").tokens == ["<s>", "\u2581" * 4, "\u2581", "b"], "runs of spaces of equal score, as Llama 2 has them"
    assert found.encode("é").tokens == ["<s>", "\u2581", "<0xC3>", "<0xA9>"]
    assert found.decode(found.encode("abb é").ids) == "abb é"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scores": [0.0] * 259 + [-10.0, -11.0, -12.0, -1.0, -2.0, -2.0, -4.0]}, "entries of equal score"),
        ({"scores": [0.0]}, "266 entries and 1 scores"),
        ({"token_type": [1] * 266}, "no entry for the byte <0x00>"),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "scores": [0.0, 0.0]}, "has the entry 'a' twice"),
        ({"eos_token_id": 99_999}, "names no end-of-text token"),
        ({"precompiled_charsmap": [1, 2]}, "normalizes text"),
        ({"tokens": "abc"}, "no tokenizer.ggml.tokens that lmworks can read"),
    ],
)
def test_what_tokenizer_json_cannot_express_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as raised:
        files_of_tokenizer(_sentencepiece(**changes))
    assert reason in str(raised.value)


def _vocabulary_only(path: Path, metadata: dict[str, Any], pre: str) -> Path:
    """The tokenizer of the real model with another rule, for a llama of no weights."""
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        getattr(writer, f"add_{key}")(metadata[f"llama.{key}"])
    writer.add_head_count(9)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(metadata["tokenizer.ggml.tokens"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _llama(files: list[Path], texts: list[str], special: bool = False) -> Any:
    python, server = engine("LMWORKS_LLAMA_PYTHON"), engine("LMWORKS_LLAMA_SERVER")
    asked = {"files": list(map(str, files)), "texts": texts, "special": special}
    return ask(python, "ids_llama.py", asked, LLAMA_CPP_LIB_PATH=str(server.parent))


@pytest.mark.slow
@pytest.mark.needs("llama")
@pytest.mark.parametrize("special", [False, True])
def test_ids_of_the_real_model_are_those_of_llama_cpp(special: bool) -> None:
    tokenizer, texts = load(tokenizer_file(gguf_file()).parent), [*_varied(), MARKED]
    for text, expected in zip(texts, _llama([gguf_file()], texts, special)[0], strict=True):
        assert tokenizer.encode(text, allow_special=special) == expected, text


@pytest.mark.slow
@pytest.mark.needs("llama")
def test_every_rule_splits_as_llama_cpp_does(tmp_path: Path) -> None:
    import tokenizers

    metadata, texts = read_header(gguf_file()).metadata, _varied()
    files = [_vocabulary_only(tmp_path / f"{number}.gguf", metadata, pre) for number, pre in enumerate(SPLITS)]
    for pre, path, expected in zip(SPLITS, files, _llama(files, texts), strict=True):
        made = tokenizers.Tokenizer.from_str(files_of_tokenizer(read_header(path).metadata)["tokenizer.json"])
        for text, ids in zip(texts, expected, strict=True):
            assert made.encode(text).ids == ids, (pre, text)


@pytest.mark.slow
@pytest.mark.needs("llama")
def test_the_real_model_computes_what_transformers_and_llama_cpp_compute(tmp_path: Path) -> None:
    """The values of all tensors are those that transformers reads; log-probabilities are those of llama.cpp on the same values in F32."""
    import transformers

    path = gguf_file()
    weights = find_weights(path)
    model, tokenizer = read_model(weights.path), load(weights.path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    expected = theirs.state_dict()
    for name, tensor in to_huggingface(model.state_dict(), model.config):
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)
    texts = ["Water moves around the Earth without end, 365 days a year.", "def add(a, b):\n    return a + b\n"]
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([tokenizer.encode(text)])
            ours, other = model(ids), theirs(ids).logits
            assert float((ours - other).abs().max() / other.abs().max()) < 5e-5
    write_gguf(model, tokenizer, tmp_path / "f32.gguf", torch.float32, "smol")
    python, server = engine("LMWORKS_LLAMA_PYTHON"), engine("LMWORKS_LLAMA_SERVER")
    answers = ask(python, "scores_llama.py", {"model": str(tmp_path / "f32.gguf"), "texts": texts}, LLAMA_CPP_LIB_PATH=str(server.parent))
    for text, answer in zip(texts, answers, strict=True):
        assert answer["ids"] == tokenizer.encode(text)
        with torch.no_grad():
            logprobs = model(torch.tensor([answer["ids"]]))[0].double().log_softmax(-1)
        ours = [float(logprobs[at, following]) for at, following in enumerate(answer["ids"][1:])]
        assert max(abs(one - other) for one, other in zip(ours, answer["logprobs"], strict=True)) < 5e-4, json.dumps(text)
