"""The base of every node in the recipe tree."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from lmworks.credentials import hide


class Node(BaseModel):
    """A frozen node: unknown keys are refused (the loader names the nearest known one). Its URLs are held without their credentials."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _hide_credentials(cls, value: Any) -> Any:
        return hide(value)
