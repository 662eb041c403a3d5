"""Prompts of samples have room in the context of the model, the default ones by themselves, and one's own before any training."""

from __future__ import annotations

import pytest

from lmworks.errors import UserError
from lmworks.evaluate.generation.replies import samples
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Tokens
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train.observe.sampling import cut, prompts
from tiny_run import Tiny


def of_context(recipe: Recipe, context: int) -> Recipe:
    model = recipe.model.model_copy(update={"max_position_embeddings": Tokens.parse(f"{context} tokens")})
    return recipe.model_copy(update={"model": model})


@pytest.mark.parametrize("context", [8, 16, 32])
def test_default_prompts_take_half_of_the_context_at_most(tiny: Tiny, context: int) -> None:
    tokenizer, recipe = load_tokenizer(tiny.run_dir / "tokenizer"), tiny.resolve().recipe
    whole = prompts(of_context(recipe, 4096), tiny.run_dir / "corpus", tokenizer.encode)
    assert max(len(tokenizer.encode(one)) for one in whole) > 4
    found = prompts(of_context(recipe, context), tiny.run_dir / "corpus", tokenizer.encode)
    assert all(0 < len(tokenizer.encode(one)) <= context // 2 for one in found)
    assert len(found) == len(whole) and all(one.startswith(short) for one, short in zip(whole, found, strict=True))


def test_prompts_are_cut_at_words_where_there_are_some() -> None:
    assert cut("one two three", list, 13) == "one two three" and cut("one two three", list, 12) == "one two"
    assert cut("one two three", list, 2) == "on" and cut("one two three", list, 0) == ""
    assert cut("\u00e9 x", lambda text: [*text.encode()], 1) == "", "its first character has two tokens"


@pytest.mark.parametrize("key", ["prompts", "questions"])
@pytest.mark.parametrize("how", ["walk", "pretrain"])
def test_a_prompt_without_room_is_refused_before_training(tiny_copy: Tiny, key: str, how: str) -> None:
    """Before the first stage if the tokenizer is there, else when it has been trained."""
    text = " ".join(["word"] * 64)
    with pytest.raises(UserError, match=rf"evaluate.{key}: 'word word .*' has \d+ tokens, and the model's context is 64; shorten it"):
        getattr(tiny_copy, how)(f"evaluate.{key}=[{text}]")


def test_a_prompt_without_room_has_an_empty_completion(tiny: Tiny) -> None:
    """So that an evaluation after training does not fail, of a run of an earlier version or with the default questions."""
    model, tokenizer = initialize(Transformer(tiny.resolve().recipe.model), 1), load_tokenizer(tiny.run_dir / "tokenizer")
    texts = ["The", " ".join(["word"] * 64), "A"]
    found = samples(model, tokenizer, texts, chat=False)
    assert [one.prompt for one in found] == texts and [bool(one.completion) for one in found] == [True, False, True]
    assert samples(model, tokenizer, texts[1:2], chat=False)[0].completion == ""
