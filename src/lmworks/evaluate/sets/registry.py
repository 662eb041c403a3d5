"""The benchmark sets, found by looking through two packages: a file here or in `evaluate/generation` with `SETS` holds some of them."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

from lmworks.errors import UserError
from lmworks.evaluate import generation, sets
from lmworks.evaluate.generation.declared import GENERATED_ONLY, Declared, given
from lmworks.evaluate.sets.choice_set import ChoiceSet
from lmworks.recipe.schema.evaluate import Benchmark

_READERS = ("registry", "loading")  # modules of the package that hold no set and read this registry


def _found(package: ModuleType) -> dict[str, Any]:
    names = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__) if module.name not in _READERS]
    found = [one for module in map(import_module, names) for one in getattr(module, "SETS", ())]
    return {one.name: one for one in sorted(found, key=lambda one: str(one.name))}


CHOICE: dict[str, ChoiceSet] = _found(sets)
"""The multiple-choice sets."""
GENERATION: dict[str, Declared] = _found(generation)
"""The sets that are answered by generated text and judged by code of their own."""


def is_generated(benchmark: Benchmark) -> bool:
    """Whether a benchmark is one of `GENERATION`."""
    return benchmark.file is None and benchmark.name in GENERATION


def check_names(benchmarks: Iterable[Benchmark]) -> None:
    """Raise `UserError` for a set that does not exist, with the nearest that does, and for an option that it does not have. A task of the
    user's own may have any name."""
    known = [*CHOICE, *GENERATION]
    for one in benchmarks:
        if is_generated(one):
            GENERATION[one.name].open(one)
        elif odd := given(one, GENERATED_ONLY):
            raise UserError(f"evaluate.benchmarks.{one.name}.{odd[0]}: only sets that are answered by generation have it; leave it out")
        if one.file is None and one.name not in known:
            near = difflib.get_close_matches(one.name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known sets: {', '.join(known)}"
            raise UserError(f"evaluate.benchmarks: no benchmark set is called {one.name!r}; {hint}")
