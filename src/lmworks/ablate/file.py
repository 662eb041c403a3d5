"""The base of ablation files: the keys of every kind, and what a kind adds."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field

from lmworks.ablate.run_set import NAME, Branch, Seeds
from lmworks.errors import UserError
from lmworks.recipe.keys import nearest
from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Tokens

DEFAULT_MEASURES = ("validation/bits_per_byte", "validation/{domain}/bits_per_byte")


@dataclass(frozen=True)
class Expansion:
    """The arms of a file: overrides by name, the baseline among them, and the branch that they continue."""

    arms: Mapping[str, list[str]]
    baseline: str
    branch: Branch | None = None
    fixed_tokens: bool = False  # the arms' phases hold the budget already
    labels: Mapping[str, float] = field(default_factory=dict)  # the number that an arm stands for, such as its learning rate


class Findings(Protocol):
    """What a kind may ask of the results."""

    def optimum(self, what: str) -> dict[str, Any] | None: ...

    def critical_batch(self, name: str, tolerance: float) -> dict[str, Any] | None: ...


class Ablation(Node):
    """An ablation: runs of one recipe that differ in a few keys (arms), each repeated over seeds."""

    kind: str
    name: str | None = Field(
        None, pattern=f"^{NAME}$", description="name of the ablation and of its directory; that of the file when omitted"
    )
    recipe: str = Field(description="recipe of all arms: a file, the name of a shipped recipe, or a run directory")
    set: list[str] = Field(default_factory=list, description="overrides of the recipe for all arms, each A.B=C as for --set")
    budget: Tokens | None = Field(
        None, description="training tokens of each run, divided over the phases in their proportions; those of the baseline when omitted"
    )
    equal: Literal["tokens", "time"] = Field(
        "tokens",
        description="what the arms have in common: tokens, or training time. time: the budget is the baseline's, and each other arm gets "
        "the tokens that it trains on in the same time, at the speed measured before the first run",
    )
    seeds: Seeds = Field(3, description="number of seeds (1, 2, ...), or a list of them; each run sets train.seed to its seed")
    measures: list[str] | None = Field(
        None,
        description="metrics, or evaluation/NAME for the results of the evaluation stage; {domain} stands for every domain. Held-out bits "
        "per byte, overall and per domain, when omitted",
    )
    noise: str | None = Field(
        None,
        description="directory of an earlier ablation of this recipe and budget: all arms are then assumed to vary as its runs, and one "
        "seed is enough",
    )
    out: str | None = Field(None, description="directory of the ablation; runs/ablations/NAME when omitted")

    default_measures: ClassVar[tuple[str, ...]] = DEFAULT_MEASURES

    @abstractmethod
    def expand(self, recipe: Recipe) -> Expansion:
        """The arms. `recipe` is the resolved recipe with the overrides of `set`. Raises `UserError` for parameters that do not fit it."""

    def conclude(self, findings: Findings) -> dict[str, Any] | None:
        """What this kind adds to the results, such as a fitted optimum: `title`, `text`, and figures."""
        return None


_INSTEAD = {r"train\.seed": "seeds", "run_dir": "out"}  # keys of the runs, by what says them for all runs
OF_LADDER = _INSTEAD | {"time": "horizons", r"train\.phases\.[^.]+\.lr_schedule(\..*)?": "warmup_fraction and decay_fraction"}
OF_ABLATION = _INSTEAD | {"time": "budget"}


def refuse_own_keys(where: str, overrides: Iterable[str], what: str, instead: Mapping[str, str]) -> None:
    """Raise `UserError` for an override of a key that a set of runs (`what`: "ladder") sets for each of its runs: it has no effect.
    `instead` has patterns of these keys."""
    for one in overrides:
        key, _, value = (part.strip() for part in one.partition("="))
        by = next((by for own, by in instead.items() if re.fullmatch(own, key)), None)
        if by and value != "null":
            raise UserError(f"{where}: {key} is of each run, and the {what} sets it by {by}; use {by} instead")


def phases_of(recipe: Recipe) -> None:
    """Raise `UserError` if the recipe has no phase to train."""
    if not recipe.train.phases:
        raise UserError("the recipe of an ablation has no phases to train; add train.phases to it")


def distinct(key: str, arms: Iterable[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Overrides by the name of their arm. Raises `UserError` if two values of a key make one name, as rates equal to six digits do."""
    found: dict[str, list[str]] = {}
    for name, overrides in arms:
        if name in found:
            raise UserError(f"{key}: two values make the arm {name}; remove one of them")
        found[name] = overrides
    return found


def meant(word: str, known: Iterable[str]) -> str:
    """The known word that `word` was probably meant to be, or all of them."""
    close = nearest(word, list(known))
    return f"did you mean {close!r}?" if close else f"there are: {', '.join(known)}"


def number(value: float) -> str:
    """A number in the name of an arm."""
    return f"{value:.6g}".replace("+", "")
