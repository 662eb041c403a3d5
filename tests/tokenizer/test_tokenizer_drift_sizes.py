from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_texts import write_source

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer import load, special
from lmworks.tokenizer.tokenizer_json import truncated
from lmworks.tokenizer.train import drift, evaluate_sizes, train


def sized(recipe: Recipe, size: int) -> Recipe:
    return recipe.model_copy(update={"tokenizer": recipe.tokenizer.model_copy(update={"vocab_size": size})})


def test_a_cut_tokenizer_is_the_one_that_training_makes_at_that_size(recipe: Recipe, corpus: Path, trained: Path, tmp_path: Path) -> None:
    train(sized(recipe, 700), corpus, tmp_path)
    small, large = (json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, trained))
    assert truncated(large, 700) == small
    assert truncated(large, 5000) == large


def test_larger_vocabularies_make_fewer_tokens(corpus: Path, trained: Path) -> None:
    weights = {"code": 0.5, "docs": 0.3, "world": 0.2}
    rows = evaluate_sizes(trained, corpus / "validation", [400, 700, 1000, 100, 10**6], weights)
    assert [row["entries"] for row in rows] == [400, 700, 1000]
    assert rows[0]["bytes_per_token"] < rows[1]["bytes_per_token"] < rows[2]["bytes_per_token"]
    assert rows[0]["fertility"] > rows[2]["fertility"] > 1
    with pytest.raises(UserError, match="can be cut to 320 to 1022 entries"):
        evaluate_sizes(trained, corpus / "validation", [10**6], weights)


def test_sources_count_by_their_weight(corpus: Path, trained: Path, tmp_path: Path) -> None:
    tokenizer = load(trained)
    texts = {"code": "def f(self):\n    return self.x\n" * 5, "world": "人人生而自由" * 50}
    for name, text in texts.items():
        write_source(tmp_path, name, [text], "validation")
    each = {name: len(tokenizer.encode(text)) / len(text.encode()) for name, text in texts.items()}
    largest = 1024 - 2
    (row,) = evaluate_sizes(trained, tmp_path / "validation", [largest], {"code": 0.75, "world": 0.25})
    assert row["tokens_per_byte"] == pytest.approx(0.75 * each["code"] + 0.25 * each["world"])
    with pytest.raises(UserError, match="no source of the mixture has held-out text"):
        evaluate_sizes(trained, tmp_path / "validation", [largest], {"docs": 1.0})


def test_a_new_domain_gains_and_the_others_pay(recipe: Recipe, corpus: Path) -> None:
    rows: dict[str, dict[str, Any]] = {row["source"]: row for row in drift(recipe, corpus, ["world"])}
    assert {name: row["added"] for name, row in rows.items()} == {"code": False, "docs": False, "world": True}
    assert rows["world"]["change"] < -0.1
    assert rows["docs"]["change"] > 0
    assert rows["docs"]["change"] == pytest.approx(rows["docs"]["fertility_after"] / rows["docs"]["fertility_before"] - 1)


def test_sources_that_are_not_there_are_named(recipe: Recipe, corpus: Path) -> None:
    with pytest.raises(UserError, match="no source books; it has code, docs, world"):
        drift(recipe, corpus, ["books"])
    with pytest.raises(UserError, match="every source is left out"):
        drift(recipe, corpus, ["code", "docs", "world"])


def test_the_reserved_tokens_of_a_small_corpus_are_no_entries(recipe: Recipe, tmp_path: Path) -> None:
    write_source(tmp_path, "docs", ["to be or not to be " * 3])
    write_source(tmp_path, "docs", ["to be"], "validation")
    report = train(recipe, tmp_path, tmp_path / "out")
    largest = 256 + report["merges"] + len(special.GLM) + len(special.MORE)
    rows = evaluate_sizes(tmp_path / "out", tmp_path / "validation", [largest, largest + 1], {"docs": 1.0})
    assert [row["entries"] for row in rows] == [largest]
