"""Which runs and recipes differ in their learning-rate schedule alone, so that one annealing law holds for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.optim.schedules import Schedules
from lmworks.recipe.schema.effect import BEFORE_TUNING
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.tree.effects import readers
from lmworks.recipe.tree.fingerprint import Change, as_tree, changed_keys
from lmworks.shards.order.timeline import Timeline

_OF_SCHEDULE = ("name", "tokens", "lr_schedule", "learning_rate_scale", "mixture_changes")  # keys of a phase; changes end what is covered
_MAY_DIFFER = ("seed", "train.seed", "train.init_seed", "train.early_stopping")
_MEASURE = "train.validate_bytes_per_domain"  # changes no weight, but the text that is validated on
_EVALUATED = 20_000  # steps of a phase at which the schedule is evaluated; it is interpolated between them
_SHOWN = 3


@dataclass(frozen=True)
class Course:
    """The schedule of the first steps of a recipe, up to its first change of the data: a phase with another mixture, batch size or
    sequence length, or a change of the mixture. `end` is the number of these steps; `reason` says why these are not all, if so."""

    recipe: Recipe
    timeline: Timeline
    end: int
    reason: str = ""

    @classmethod
    def of(cls, recipe: Recipe, mixture_changed: int | None = None) -> Course:
        """`mixture_changed` is the first step at which the mixture was changed while the run was active."""
        timeline = Timeline(recipe.train.phases)
        end, reason = timeline.steps, ""
        later = _data_of(recipe.train.phases[0]) | dict[str, Any](batch_ramp=None)
        for index, phase in enumerate(recipe.train.phases):
            first = timeline.first_step(index)
            if changed := [key for key, value in _data_of(phase).items() if index and value != later[key]]:
                end, reason = first, f"phase {phase.name} has another {' and '.join(changed)}"
                break
            if phase.mixture_changes:
                at = min(timeline.phases[index].step_at(change.at) for change in phase.mixture_changes)
                end, reason = first + at, f"the mixture changes in phase {phase.name}"
                break
        if mixture_changed is not None and mixture_changed < end:
            end, reason = mixture_changed, f"the mixture was changed at step {mixture_changed:,}"
        return cls(recipe, timeline, end, reason)

    @cached_property
    def _schedules(self) -> Schedules:
        return Schedules(self.recipe.train.phases, [phase.steps for phase in self.timeline.phases], self.timeline.tokens_before)

    @cached_property
    def after_warmup(self) -> int:
        """The first step after the first phase's warm-up and batch ramp."""
        return max(self._schedules.warmup_end(0), self.timeline.phases[0].ramp_steps)

    def is_warmed_up(self, step: int) -> bool:
        """Whether the last of `step` steps lies in no warm-up."""
        return step > max(self.after_warmup, self._schedules.warmup_end(step - 1))

    def lr_factors(self) -> np.ndarray:
        """The learning rate of each step as a fraction of the peak."""
        found = np.empty(self.timeline.steps)
        for index, phase in enumerate(self.timeline.phases):
            first = self.timeline.first_step(index)
            at = np.unique(np.linspace(0, phase.steps - 1, min(phase.steps, _EVALUATED)).round().astype(int))
            values = [self._schedules.lr_factor(first + int(step)) for step in at]
            found[first : first + phase.steps] = np.interp(np.arange(phase.steps), at, values)
        return found[: self.end]

    @property
    def final_rate(self) -> float:
        """The learning rate of the recipe's last step as a fraction of that of its highest phase."""
        highest = max(phase.learning_rate_scale for phase in self.recipe.train.phases)
        return self._schedules.lr_factor(self.timeline.steps - 1) / highest


def require_comparable(run: Recipe, other: Recipe, name: str, run_name: str, same_corpus: bool, remedy: str = "") -> None:
    """Raises `UserError` if two recipes differ in more than the schedule. `same_corpus`: their corpora are known to be the same, so the
    keys that decide them are not compared."""
    changes = _differences(run, other, same_corpus)
    if not changes:
        return
    shown = ", ".join(map(str, changes[:_SHOWN])) + (f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else "")
    raise UserError(
        f"{name} differs from {run_name} in {shown}; the law holds for one model, corpus, batch size and optimizer: "
        f"{remedy or _remedy(changes)}"
    )


def _remedy(changes: Sequence[Change]) -> str:
    if len(changes) > _SHOWN or any(change.leaves or isinstance(change.old, dict | list) or change.old is None for change in changes):
        return "name runs of the same recipe"
    return "add " + " ".join(f"--set '{change.path}={change.old}'" for change in changes)


def _differences(run: Recipe, other: Recipe, same_corpus: bool) -> list[Change]:
    stages = ("pretrain",) if same_corpus else BEFORE_TUNING
    changes = [
        change for change in changed_keys(run, other)
        if not change.path.startswith("train.phases") and change.path not in _MAY_DIFFER
        and (change.path == _MEASURE or any(stage in readers(key) for key in change.keys for stage in stages))
    ]  # fmt: skip
    before, after = run.train.phases[0], other.train.phases[0]
    name = f"train.phases.{after.name}"
    return changes + [
        Change(f"{name}.{change.path}", change.old, change.new, change.leaves) for change in changed_keys(_data_of(before), _data_of(after))
    ]


def _data_of(phase: Phase) -> dict[str, Any]:
    """What a step of the phase trains on, and how, apart from its learning rate."""
    path = f"train.phases.{phase.name}"
    return {
        key: value for key, value in as_tree(phase).items() if key not in _OF_SCHEDULE and "pretrain" in readers(f"{path}.{key}")
    }


def corpus_of(recipe: Recipe) -> Path | None:
    """The run directory of a recipe, if a corpus was made in it."""
    assert recipe.run_dir
    run_dir = Path(recipe.run_dir)
    return run_dir if (run_dir / "corpus" / "manifest.json").is_file() else None
