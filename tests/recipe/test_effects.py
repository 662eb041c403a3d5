"""What each key affects is declared beside it, and nothing is forgotten or said twice."""

from __future__ import annotations

import pytest

from lmworks.recipe.changes import declarations, effect_of, not_architecture, readers, rule
from lmworks.recipe.keys import known_paths
from lmworks.recipe.schema.base import Effect
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe


def test_every_key_has_an_effect() -> None:
    """A section of the recipe declares the effect of all its keys, so a new key has that effect unless it declares its own."""
    assert Recipe.effect is None, "nothing stands in for a section that declares no effect"
    silent = [key for key in Recipe.model_fields if key not in {path for path, _ in declarations()}]
    assert not silent, "declare what these keys affect: Annotated[TYPE, read_by(...)], or effect in the class"
    assert all(isinstance(effect_of(path), Effect) for path in known_paths(Recipe))


def test_no_declaration_is_redundant() -> None:
    declared = dict(declarations())
    assert len(declared) == len(list(declarations()))
    for path, effect in declared.items():
        above = path.rpartition(".")[0]
        while above and above not in declared:
            above = above.rpartition(".")[0]
        assert declared.get(above) != effect, f"{path} declares what {above} declares already"


@pytest.mark.parametrize(
    ("path", "stages"),
    [
        ("train.phases", ("pretrain", "evaluate", "export")),
        ("train.phases.general", ("pretrain",)),
        ("train.phases.general.lr_schedule.warmup", ("pretrain",)),
        ("train.phases.0.mixture.web.high", ("tokenizer", "pretrain")),
        ("corpus.sources.notes.fim.rate", ("shards",)),
        ("corpus.sources.notes.files", ("corpus",)),
        ("corpus.steps.quality.threshold", ("corpus",)),
        ("shards.imported.NAME", ("shards", "pretrain")),
        ("model.moe.a_key_of_another_version", ("pretrain", "tune", "dpo", "grpo", "evaluate", "export")),
    ],
)
def test_an_effect_holds_for_all_below(path: str, stages: tuple[str, ...]) -> None:
    assert readers(path) == stages


def test_the_strictest_rule_counts() -> None:
    assert rule(["name", "checkpoints.keep_last"]) == "free"
    assert rule(["name", "layout.tp"]) == rule(["name", "model.moe.balance.method"]) == "allow"
    assert rule(["name", "layout.tp", "tokenizer.kind"]) == "never"
    assert rule(["tokenizer.chat_template"]) == "allow"


def test_what_is_not_architecture() -> None:
    """These keys may differ between a checkpoint and the model that it is loaded into: a key that changes the forward must not be added."""
    assert set(not_architecture(Model)) == {
        "preset", "max_position_embeddings", "residual_dropout", "attention_dropout", "initializer_range", "z_loss_weight", "moe.balance",
        "moe.capacity_factor", "moe.temperature", "moe.temperature_steps",
    }  # fmt: skip
