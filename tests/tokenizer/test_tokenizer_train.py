from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizer_texts import write_source

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer import Tokenizer, load, special, tokenizer_json
from lmworks.tokenizer.evaluate import draw_sample, source_weights
from lmworks.tokenizer.train import train


def with_tokenizer(recipe: Recipe, **options: Any) -> Recipe:
    return recipe.model_copy(update={"tokenizer": recipe.tokenizer.model_copy(update=options)})


def test_vocabulary_has_the_size_asked_for_and_special_tokens_at_its_end(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == tokenizer.reference.get_vocab_size() == 1024
    names = [*special.GLM, *special.MORE, "<|reserved_0|>", "<|reserved_1|>"]
    assert tokenizer.special == {name: 1024 - len(names) + n for n, name in enumerate(names)}


def test_training_again_gives_the_same_file(recipe: Recipe, corpus: Path, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("left by a killed try")
    report = train(recipe, corpus, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()
    other = Recipe.model_validate(recipe.model_dump() | {"seed": 2})
    train(other, corpus, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() != (trained / "tokenizer.json").read_bytes()
    assert report["merges"] == 1024 - 256 - 66
    assert report["evaluation"] and not any(row["round_trip_failures"] for row in report["evaluation"])


def test_sample_follows_the_mixture_and_short_sources_are_made_up_for(tmp_path: Path) -> None:
    for name, count in (("big", 400), ("other", 400), ("tiny", 3)):
        write_source(tmp_path, name, [f"{name} {n:04d} " + "x" * 90 for n in range(count)])
    size = 20_000
    used = Counter[str]()
    for source, _, text in draw_sample(tmp_path, {("big", "en"): 0.6, ("other", "en"): 0.2, ("tiny", "en"): 0.2}, size, seed=1):
        used[source] += len(text.encode())
    tiny = 3 * 100
    assert used.total() == size
    assert used["tiny"] == tiny
    assert used["big"] == pytest.approx((size - tiny) * 0.75, abs=200)


def test_sample_is_keyed_by_the_seed_and_never_repeats_a_document(tmp_path: Path) -> None:
    write_source(tmp_path, "one", [f"document {n} é" for n in range(60)])
    drawn = [[text for _, _, text in draw_sample(tmp_path, {("one", "en"): 1.0}, 10_000, seed)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(drawn[0]) == sorted(drawn[2]) == sorted(f"document {n} é" for n in range(60))


def test_weights_are_over_all_phases_and_leave_out_what_is_not_there(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_source(tmp_path, name, ["text"])
    common = {"sequence_length": "1Ki", "global_batch_tokens": "1Ki"}
    phases = [{"name": "one", "tokens": "3M", "mixture": {"a": 1.0}, **common},
              {"name": "two", "tokens": "1M", "mixture": {"b": 0.5, "absent": 0.5}, **common}]
    weights = source_weights(Recipe.model_validate({"name": "t", "train": {"phases": phases}}), tmp_path)
    assert weights == pytest.approx({"a": 3 / 3.5, "b": 0.5 / 3.5})
    assert source_weights(Recipe(name="t"), tmp_path) == {"a": 0.5, "b": 0.5}


def test_little_text_is_filled_up_with_reserved_tokens(recipe: Recipe, tmp_path: Path) -> None:
    write_source(tmp_path / "corpus", "docs", ["to be or not to be"])
    report = train(recipe, tmp_path / "corpus", tmp_path / "out")
    assert report["reserved_for_lack_of_text"] == 1024 - 256 - report["merges"] - 66 > 0
    assert load(tmp_path / "out").vocab_size == 1024


def test_an_empty_corpus_and_a_tiny_vocabulary_are_refused(recipe: Recipe, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \.parquet files"):
        train(recipe, tmp_path, tmp_path / "out")
    write_source(tmp_path / "blank", "docs", ["", ""])
    with pytest.raises(UserError, match="holds no text"):
        train(recipe, tmp_path / "blank", tmp_path / "out")
    with pytest.raises(UserError, match="set it to at least 356"):
        train(with_tokenizer(recipe, vocab_size=320, num_special_tokens=100), corpus, tmp_path / "out")


def test_a_given_tokenizer_is_taken_over_and_filled_up(recipe: Recipe, corpus: Path, trained: Path, tmp_path: Path) -> None:
    report = train(with_tokenizer(recipe, path=str(trained), vocab_size=1088), corpus, tmp_path)
    old, new = load(trained), load(tmp_path)
    assert (new.vocab_size, report["reserved_to_fill"]) == (1088, 64)
    text = "def f(x):\n    return '人人生而自由'"
    assert new.encode(text) == old.encode(text)
    assert new.special.items() > old.special.items()


def mended(trained: Path, tmp_path: Path, change: Any) -> str:
    spec = json.loads((trained / "tokenizer.json").read_text())
    change(spec)
    (tmp_path / "given.json").write_text(json.dumps(spec))
    return str(tmp_path / "given.json")


def swap_merges(spec: dict[str, Any]) -> None:
    merges = spec["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def resplit(spec: dict[str, Any]) -> None:
    """Replace the merge of a long token by another split of it, which training would not reach."""
    merges = spec["model"]["merges"]
    at = next(n for n, (left, right) in enumerate(merges) if len(left) > 2 and left[:-1] in spec["model"]["vocab"]
              and left[-1] + right in spec["model"]["vocab"])
    left, right = merges[at]
    merges[at] = [left[:-1], left[-1] + right]


@pytest.mark.parametrize(("change", "message"), [
    (lambda spec: spec.update(normalizer={"type": "NFKC"}), "normalizer NFKC"),
    (lambda spec: spec.update(pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer"),
    (lambda spec: spec["model"].update(type="Unigram"), "not BPE"),
    (lambda spec: spec["model"].update(byte_fallback=True), "byte_fallback"),
    (lambda spec: spec["model"].update(unk_token="<unk>"), "unk_token"),
    (lambda spec: [token.update(content=f"<|sys_{n}|>") for n, token in enumerate(spec["added_tokens"])],
     r"has 1024 entries and lacks 7 special tokens but tokenizer.vocab_size is 1024; set it to 1031 or more"),
    (lambda spec: spec["added_tokens"].pop(3), "gaps"),
    (swap_merges, "not in the order of the token ids"),
    (resplit, "not reached by the merges"),
])
def test_a_tokenizer_that_would_encode_otherwise_is_refused(
        recipe: Recipe, corpus: Path, trained: Path, tmp_path: Path, change: Any, message: str) -> None:
    path = mended(trained, tmp_path, change)
    with pytest.raises(UserError, match=message) as caught:
        train(with_tokenizer(recipe, path=path), corpus, tmp_path / "out")
    assert "given.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_given_tokenizer_must_fit_the_vocabulary(recipe: Recipe, corpus: Path, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 1024 entries but tokenizer\.vocab_size is 960"):
        train(with_tokenizer(recipe, path=str(trained / "tokenizer.json"), vocab_size=960), corpus, tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        train(with_tokenizer(recipe, path=str(tmp_path / "none.json")), corpus, tmp_path)


def test_long_merge_lists_as_of_glm_and_llama_3_are_understood(trained: Path) -> None:
    """Those list every cut of a token into two; the ids are the same."""
    spec = json.loads((trained / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    every = [(number, text[:at], text[at:]) for text, number in vocab.items() for at in range(1, len(text))
             if text[:at] in vocab and text[at:] in vocab]
    spec["model"]["merges"] = [[left, right] for _, left, right in sorted(every)]
    found = tokenizer_json.read_bpe(spec, "long.json")
    assert len(found.merges) > 1024 - 256 - 66
    tokenizer_json.check_same_ids(found, "long.json")


def test_config_is_complete(trained: Path, recipe: Recipe) -> None:
    config = json.loads((trained / "tokenizer_config.json").read_text())
    assert "model_max_length" not in config  # that is the model's, which may learn longer contexts without another tokenizer
    assert config["eos_token"] == config["pad_token"] == "<|endoftext|>"
    assert config["chat_template"] == (trained / "chat_template.jinja").read_text()
    assert {"[gMASK]", "<|user|>", "<|code_prefix|>"} < set(config["additional_special_tokens"])
    assert "<think>" not in config["additional_special_tokens"]  # a parser of the answer needs to see it
    assert len(config["added_tokens_decoder"]) == 66
