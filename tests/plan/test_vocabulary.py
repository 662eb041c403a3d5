from __future__ import annotations

import io

import pytest
from rich.console import Console

from lmworks.plan.counts import compare_vocabularies, table
from lmworks.recipe.load import load_recipe

# Tokens per byte fall with the logarithm of the size, as they do on real text.
MEASURED = [{"entries": 2**n, "tokens_per_byte": 0.55 - 0.02 * n, "bytes_per_token": 1 / (0.55 - 0.02 * n), "fertility": 1.5}
            for n in range(12, 18)]  # fmt: skip


def chosen(preset: str) -> int:
    rows = compare_vocabularies(load_recipe(preset).recipe.model, 2048, MEASURED)
    (row,) = [row for row in rows if row["recommended"]]
    return int(row["entries"])


def test_the_larger_the_model_the_larger_its_vocabulary() -> None:
    sizes = [chosen(name) for name in ("quickstart", "dense-125m", "glm46-355b-a32b")]
    assert sizes[0] < sizes[1] < sizes[2] == 2**17


def test_figures_are_those_of_the_plan() -> None:
    from lmworks.plan.counts import count_by_component, flops_per_token

    recipe = load_recipe("glm-15b-a3b").recipe
    row = compare_vocabularies(recipe.model, 4096, MEASURED)[3]
    model = recipe.model.model_copy(update={"vocab_size": row["entries"]})
    assert row["parameters"] == count_by_component(model).total
    assert row["flops_per_byte"] == pytest.approx(flops_per_token(model, 4096).total * row["tokens_per_byte"])
    assert row["embedding_share"] == pytest.approx(2 * row["entries"] * model.hidden_size / count_by_component(model).total)
    text = io.StringIO()
    Console(width=200, file=text).print(table(compare_vocabularies(recipe.model, 4096, MEASURED)))
    assert "the smallest vocabulary within 1% of the fewest FLOPs per byte" in " ".join(text.getvalue().split())


def test_equal_costs_go_to_the_smaller_vocabulary() -> None:
    flat = [row | {"tokens_per_byte": 0.25} for row in MEASURED]
    assert [row["entries"] for row in compare_vocabularies(load_recipe("glm-15b-a3b").recipe.model, 2048, flat) if row["recommended"]] == [
        2**12
    ]
