"""The base of every node in the recipe tree."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from lmworks.credentials import hide
from lmworks.recipe.schema.effect import Effect


class Node(BaseModel):
    """A frozen node: unknown keys are refused (the loader names the nearest known one). Its URLs are held without their credentials."""

    renamed: ClassVar[dict[str, str]] = {}
    """Former names of keys, each with the name that it has now."""
    moved: ClassVar[dict[str, str]] = {}
    """Keys that stand at the top of the recipe now, each with its name there."""
    removed: ClassVar[dict[str, str]] = {}
    """Former keys that no single key replaces, each with what to do instead."""
    effect: ClassVar[Effect | None] = None
    """What the keys affect that declare nothing themselves; None: what the node around this one declares."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _hide_credentials(cls, value: Any) -> Any:
        return hide(value)
