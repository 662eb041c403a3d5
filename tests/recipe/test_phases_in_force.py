"""What holds in a phase is what phases before it have changed, and what it changes itself."""

from __future__ import annotations

from typing import Any

from lmworks.recipe.phases import final, in_force
from lmworks.recipe.schema.recipe import Recipe
from small_config import small_config


def recipe_of(*changes: dict[str, Any], **model: Any) -> Recipe:
    common = {"tokens": "1Ki", "sequence_length": 32, "global_batch_tokens": 256, "mixture": {"web": 1.0}}
    phases = [common | {"name": f"phase{number}"} | change for number, change in enumerate(changes)]
    return Recipe.model_validate({"name": "phases", "model": small_config(**model), "train": {"phases": phases}})


def test_positions_stay_as_a_phase_has_set_them() -> None:
    recipe = recipe_of({}, {"rope": {"theta": 1e6}}, {}, rope={"theta": 500.0, "partial_rotary_factor": 0.5})
    assert [(one.rope.theta, one.rope.partial_rotary_factor) for one in in_force(recipe)] == [(500.0, 0.5), (1e6, 0.5), (1e6, 0.5)]
    assert final(recipe).rope.theta == 1e6


def test_a_phase_may_give_all_layers_full_attention() -> None:
    recipe = recipe_of({}, {"sliding_window": "full"}, sliding_window="8 tokens")
    windowed, full = in_force(recipe)
    assert windowed.sliding_window == 8 and windowed.slides(0)
    assert full.sliding_window is None and not any(map(full.slides, range(2)))
