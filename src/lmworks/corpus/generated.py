"""Questions and answers made by the generators of reasoning-gym, for tuning and for evaluation."""

from __future__ import annotations

import difflib
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.schema.evaluate import Generator


def create(generator: Generator, seed: int, size: int, key: str = "evaluate.tasks") -> Any:
    """The package's data set of `size` items; item i depends on the seed `seed` + i. `UserError` names `key` of the recipe."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError(f"{key} needs reasoning-gym: pip install 'lmworks[eval]', or --set {key}=[]") from None
    name = generator.name
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 1)
        raise UserError(f"{key}: reasoning-gym has no task {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    if not generator.options:
        return reasoning_gym.create_dataset(name, seed=seed, size=size)
    try:
        items = reasoning_gym.create_dataset(name, seed=seed, size=size, **generator.options)
        items[0]  # some options of a wrong kind are noticed only here
    except Exception as error:  # of whatever kind the generator's own code raises
        raise UserError(f"{key}.{name}.options: reasoning-gym refuses them ({error})") from None
    return items
