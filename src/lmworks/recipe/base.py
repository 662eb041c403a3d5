"""The base of every node in the recipe tree."""

from pydantic import BaseModel, ConfigDict


class Node(BaseModel):
    """A frozen node: unknown keys are refused (the loader names the nearest known one)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
