"""A step is two places: its options in the schema of the recipe, its function in `corpus/transform`."""

from __future__ import annotations

from typing import get_args

import pytest

from lmworks.corpus.transform import steps
from lmworks.recipe.reference import reference
from lmworks.recipe.schema import steps as schema
from lmworks.recipe.schema.steps import STEPS, StepOptions


def test_the_recipe_and_the_engine_know_the_same_steps() -> None:
    options = {one for one in vars(schema).values() if isinstance(one, type) and issubclass(one, StepOptions) and one is not StepOptions}
    assert options == set(STEPS.values()) == set(steps._MAKERS)


@pytest.mark.parametrize("name", STEPS)
def test_every_step_is_in_the_reference(name: str) -> None:
    assert get_args(STEPS[name].model_fields["step"].annotation) == (name,)
    assert f"## {STEPS[name].__name__}\n" in reference()["corpus.md"]
