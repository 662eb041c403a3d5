"""The base of every node in the recipe tree, and what a key affects, which is declared beside the key.

A node states the effect of all its keys as `effect`; a field states its own as `Annotated[TYPE, read_by(...)]`. A key without an effect of
its own has that of the node around it. `lmworks.recipe.changes` finds the effect of a key and derives everything else from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from lmworks.io.urls import hide

StageName = Literal["corpus", "tokenizer", "shards", "pretrain", "tune", "dpo", "grpo", "evaluate", "export"]
Rule = Literal["free", "allow", "never"]
"""What a change of a key needs once there is a checkpoint: nothing, `--allow KEY`, or another run directory."""

BEFORE_TUNING: tuple[StageName, ...] = ("corpus", "tokenizer", "shards", "pretrain")  # the stages whose output reaches pretrained weights


@dataclass(frozen=True)
class Effect:
    """The stages whose own code reads a key. Files that a stage reads of an earlier stage do not count: the stage names those itself.

    `resume`: no finished stage depends on the key, but a run in progress would not resume bit-exactly. `frozen`: the weights would mean
    something else after a change. `optimizer_state`: the state of the optimizer would have other tensors.
    """

    readers: tuple[StageName, ...] = ()
    resume: bool = False
    frozen: bool = False
    optimizer_state: bool = False

    @property
    def rule(self) -> Rule:
        if self.frozen or self.optimizer_state:
            return "never"
        return "allow" if self.resume or any(stage in BEFORE_TUNING for stage in self.readers) else "free"


def read_by(*stages: StageName, frozen: bool = False, optimizer_state: bool = False) -> Effect:
    """The effect of a key that these stages read."""
    return Effect(stages, frozen=frozen, optimizer_state=optimizer_state)


NO_EFFECT = Effect()
"""The key changes no result."""
RESUME_ONLY = Effect(resume=True)
"""The key changes only the rounding of a run in progress, or when it stops: a resumed run would not be bit-exact."""


@dataclass(frozen=True)
class _NotArchitecture:
    pass


NOT_ARCHITECTURE = _NotArchitecture()
"""Marks a key of the model that does not change what given weights compute: a checkpoint loads into a model that differs in it."""


class Node(BaseModel):
    """A frozen node: unknown keys are refused (the loader names the nearest known one). Its URLs are held without their credentials."""

    effect: ClassVar[Effect | None] = None
    """What the keys affect that declare nothing themselves; None: what the node around this one declares."""

    text_form: ClassVar[dict[str, Any] | None] = None
    """The JSON Schema of texts that may stand for the map of this node, which a validator of its own spells out."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _hide_credentials(cls, value: Any) -> Any:
        return hide(value)
