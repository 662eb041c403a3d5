"""Tokenizers in the form of Llama 3's and Qwen's, trained here by `tokenizers`, are taken over with the ids that they have."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
import tokenizers
from tokenizer_texts import ARTICLE, library
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lmworks.io.files import read_json
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer import Tokenizer, load, special
from lmworks.tokenizer.train import train

_LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{n}|>" for n in range(4)), "<|start_header_id|>",
          "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{n}|>" for n in range(4, 12))]
_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"]
_TEXTS = [*ARTICLE.values(), "def f(x):\n    return x  # 12345 <|user|>\n", "caf\u00e9 na\u00efve \u00c5"]


def _foreign(kind: str, path: Path) -> tokenizers.Tokenizer:
    """A tokenizer of 700 entries and its special tokens, as the published tokenizer.json has it: regex, normalizer, post-processor."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama"))
    split = special.SPLIT if kind == "llama" else special.SPLIT_DIGITS
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    if kind == "qwen":
        made.normalizer = normalizers.NFC()
    made.train_from_iterator(
        [*library("argparse", "inspect"), *ARTICLE.values()],
        trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    made.add_special_tokens([AddedToken(name, normalized=False) for name in (_LLAMA if kind == "llama" else _QWEN)])
    if kind == "llama":
        begin = made.token_to_id("<|begin_of_text|>")
        made.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)])])
    made.save(str(path))
    return made


@pytest.fixture(params=["llama", "qwen"], scope="module")
def adopted(
    request: pytest.FixtureRequest, recipe: Recipe, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, tokenizers.Tokenizer, Tokenizer, int]:
    folder = tmp_path_factory.mktemp(request.param)
    foreign = _foreign(request.param, folder / "tokenizer.json")
    entries = foreign.get_vocab_size()
    options = recipe.tokenizer.model_copy(update={"path": str(folder), "vocab_size": entries + (0 if request.param == "llama" else 6)})
    train(recipe.model_copy(update={"tokenizer": options}), corpus, folder / "out")
    return request.param, foreign, load(folder / "out"), entries


def test_text_keeps_its_ids_and_comes_back(adopted: tuple[str, tokenizers.Tokenizer, Tokenizer, int]) -> None:
    _, foreign, ours, _ = adopted
    for text in _TEXTS:
        ids = ours.encode(text)
        assert ids == foreign.encode(unicodedata.normalize("NFC", text), add_special_tokens=False).ids
        assert ours.decode(ids) == text
        assert ours.decode(ours.encode(unicodedata.normalize("NFD", text))) == unicodedata.normalize("NFD", text)
    assert max(ours.encode("<|endoftext|><|user|>")) < 700, "what stands in text is no special token"


def test_special_tokens_are_taken_from_its_own_before_any_is_added(adopted: tuple[str, tokenizers.Tokenizer, Tokenizer, int]) -> None:
    kind, foreign, ours, entries = adopted
    report = read_json(ours.directory / "report.json")
    if kind == "llama":
        assert ours.vocab_size == entries
        assert ours.eos_id == foreign.token_to_id("<|end_of_text|>")
        before = {new: old for old, new in report["special_tokens_renamed"].items()}
        assert ours.special["<|user|>"] == foreign.token_to_id(before["<|user|>"])
        assert ours.special["<|eot_id|>"] == foreign.token_to_id("<|eot_id|>")
        assert report["special_tokens_added"] == []
    else:
        assert ours.vocab_size == entries + 6
        assert ours.eos_id == foreign.token_to_id("<|endoftext|>")
        assert report["special_tokens_added"] == [name for name in special.REQUIRED if name != special.END]
        assert [ours.special[name] for name in report["special_tokens_added"]] == list(range(entries, entries + 6))
        assert report["normalizer_left_out"] == "NFC"


def test_it_chats_as_transformers_reads_it(adopted: tuple[str, tokenizers.Tokenizer, Tokenizer, int]) -> None:
    from transformers import AutoTokenizer

    _, _, ours, _ = adopted
    messages = [{"role": "user", "content": "Hi <|user|> 12"}, {"role": "assistant", "content": "Hello"}]
    ids, mask = ours.encode_chat(messages)
    theirs = AutoTokenizer.from_pretrained(ours.directory)
    assert ours.decode(ids) == ours.apply_chat(messages) == theirs.apply_chat_template(messages, tokenize=False)
    plain = [{"role": "user", "content": "Hi 12"}, messages[1]]
    assert ours.encode_chat(plain)[0] == theirs.apply_chat_template(plain, tokenize=True, return_dict=False)
    assert ours.decode([token for token, on in zip(ids, mask, strict=True) if on]) == "Hello<|endoftext|>"
