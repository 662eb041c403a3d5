"""All steps: every subclass of `StepOptions` in a file of this package."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args

from pydantic import Field

from lmworks.corpus import steps
from lmworks.corpus.steps.base import StepOptions


def _found() -> dict[str, type[StepOptions]]:
    names = [module.name for module in pkgutil.iter_modules(steps.__path__) if module.name != "registry"]
    found: dict[str, type[StepOptions]] = {}
    for module in (import_module(f"{steps.__name__}.{name}") for name in names):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, StepOptions) and value is not StepOptions:
                found[get_args(value.model_fields["step"].annotation)[0]] = value
    return dict(sorted(found.items()))


STEPS = _found()
"""The value of `step` in a recipe to the options of that step."""

if TYPE_CHECKING:
    AnyStep = StepOptions
else:
    AnyStep: Any = Annotated[Union[tuple(STEPS.values())], Field(discriminator="step")]  # noqa: UP007
