"""Which runs and recipes one law holds for: an annealing law for those that differ in their learning-rate schedule alone, and the law of a
ladder for those that also differ in what follows from their size and their token budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.recipe.changes import Change, as_tree, changed_keys, readers
from lmworks.recipe.schema.base import BEFORE_TUNING, StageName
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.timeline import Schedules, Timeline

_OF_SCHEDULE = ("name", "tokens", "lr_schedule", "learning_rate_scale", "mixture_changes")  # keys of a phase; changes end what is covered
_MAY_DIFFER = ("seed", "train.seed", "train.init_seed", "train.early_stopping")
_MEASURE = "train.validation_bytes_per_domain"  # changes no weight, but the text that is validated on
_EVALUATED = 20_000  # steps of a phase at which the schedule is evaluated; it is interpolated between them
_SHOWN = 3
_SAME_END = 0.01  # of the peak learning rate: schedules whose ends differ by less end alike
_OF_SIZE = frozenset((
    *(f"model.{name}" for name in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "layer_types",
        "initializer_range", "moe.moe_intermediate_size", "moe.first_k_dense_replace", "mla.q_lora_rank", "mla.kv_lora_rank",
        "mla.qk_rope_head_dim", "mla.qk_nope_head_dim", "mla.v_head_dim",
    )),
    "optimizer.learning_rate", "optimizer.adam_learning_rate",
))  # keys in which the sizes of a ladder differ  # fmt: skip
_OF_BATCH = ("global_batch_tokens", "batch_ramp")


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
        if grows := [phase.name for phase in recipe.train.phases if phase.loss_ramp is not None]:
            raise UserError(
                f"phase {grows[0]}: its batch grows with the loss (batch_ramp.kind), and laws of the loss hold for one batch size; leave "
                "batch_ramp out"
            )
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
    if changes := _differences(run, other, same_corpus):
        raise UserError(
            f"{name} differs from {run_name} in {_shown(changes)}; the law holds for one model, corpus, batch size and optimizer: "
            f"{remedy or _remedy(changes)}"
        )


def require_one_ladder(run: Recipe, other: Recipe, name: str, run_name: str, remedy: str = "") -> None:
    """Raises `UserError` if two recipes of one corpus differ in more than their size, token budget, batch size, peak learning rate and the
    course of the schedule to an end that they have in common. `require_batch_rule` compares the batch sizes, which takes all runs."""
    changes = [change for change in _settings(run, other, ("pretrain",)) if not _OF_SIZE.issuperset(change.keys)]
    before, after = _data_of_phases(run), _data_of_phases(other)
    if len(before) == len(after):
        pairs = zip(_distinct_phases(other), before, after, strict=True)
        changes += [
            Change(f"train.phases.{phase}.{change.path}", change.old, change.new, change.leaves)
            for phase, one, two in pairs for change in changed_keys(one, two)
        ]  # fmt: skip
    else:
        changes.append(Change("the number of phases with data of their own", len(before), len(after)))
    if changes:
        raise UserError(
            f"{name} differs from {run_name} in {_shown(changes)}; the law of a ladder holds for one vocabulary, mixture and optimizer: "
            f"{remedy or _remedy(changes)}"
        )
    end, other_end = Course.of(run).final_rate, Course.of(other).final_rate
    if abs(end - other_end) > _SAME_END:
        raise UserError(
            f"{name} ends at {other_end:.0%} of its peak learning rate, and {run_name} at {end:.0%}; the loss depends on it, and the law "
            f"of a ladder holds for one: {remedy or f'let the schedule of its last phase end at {end:.2g} (lr_schedule.min_lr_ratio)'}"
        )


def require_same_schedule(run: Recipe, other: Recipe, name: str, run_name: str, remedy: str) -> None:
    """Raises `UserError` if two recipes have different learning rates, as fractions of the peak, at some step."""
    if not np.array_equal(Course.of(run).lr_factors(), Course.of(other).lr_factors()):
        raise UserError(f"{name} has another learning-rate schedule than {run_name}; {remedy}")


@dataclass(frozen=True)
class Batch:
    """The tokens per step of a run (of its longest phase), with what a rule may derive them from."""

    name: str
    parameters: int
    tokens: int
    batch: int

    @classmethod
    def of(cls, name: str, recipe: Recipe, parameters: int, tokens: int) -> Batch:
        return cls(name, parameters, tokens, int(max(recipe.train.phases, key=lambda phase: int(phase.tokens)).global_batch_tokens))


def require_batch_rule(batches: Sequence[Batch], target: Batch | None = None) -> None:
    """Raises `UserError` if the batch sizes of a ladder follow no rule: all equal, or one for each size or for each token budget that does
    not fall with it. A `target` has to follow the rule of the ladder."""
    counts = Counter(one.batch for one in batches)
    if target is not None and len(counts) == 1:
        if target.batch not in counts:
            raise UserError(
                f"{target.name} has a batch of {target.batch:,} tokens, and all runs of the ladder have {next(iter(counts)):,}: set "
                f"global_batch_tokens of its phases to {next(iter(counts))} tokens"
            )
        return
    if _has_rule([*batches, target] if target else batches):
        return
    if target is not None and _has_rule(batches):
        raise UserError(
            f"{target.name} has a batch of {target.batch:,} tokens, and that of the ladder's runs grows with their size or token budget: "
            "set global_batch_tokens of its phases by the same rule"
        )
    (usual, _), *_ = counts.most_common()
    odd = next(one for one in batches if one.batch != usual)
    usually = next(one.name for one in batches if one.batch == usual)
    raise UserError(
        f"{odd.name} has a batch of {odd.batch:,} tokens, and {usually} one of {usual:,}: the runs of a ladder need one batch size, or one "
        "for each size or for each token budget; leave the odd ones out, or set global_batch_tokens"
    )


def _has_rule(batches: Sequence[Batch]) -> bool:
    return any(_follows([(getattr(one, name), one.batch) for one in batches]) for name in ("parameters", "tokens"))


def _follows(pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether the second numbers are a function of the first that does not fall."""
    found = sorted(set(pairs))
    return all(low[0] < high[0] and low[1] <= high[1] for low, high in pairwise(found))


def same_training(run: Recipe, other: Recipe) -> bool:
    """Whether two recipes train bit by bit the same model on the same corpus."""
    return not any("pretrain" in readers(key) for change in changed_keys(run, other) for key in change.keys)


def _shown(changes: Sequence[Change]) -> str:
    return ", ".join(map(str, changes[:_SHOWN])) + (f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else "")


def _remedy(changes: Sequence[Change]) -> str:
    if len(changes) > _SHOWN or any(change.leaves or isinstance(change.old, dict | list) or change.old is None for change in changes):
        return "name runs of the same recipe"
    return "add " + " ".join(f"--set '{change.path}={change.old}'" for change in changes)


def _differences(run: Recipe, other: Recipe, same_corpus: bool) -> list[Change]:
    changes = _settings(run, other, ("pretrain",) if same_corpus else BEFORE_TUNING)
    before, after = run.train.phases[0], other.train.phases[0]
    name = f"train.phases.{after.name}"
    return changes + [
        Change(f"{name}.{change.path}", change.old, change.new, change.leaves) for change in changed_keys(_data_of(before), _data_of(after))
    ]


def _settings(run: Recipe, other: Recipe, stages: Sequence[StageName]) -> list[Change]:
    """What these stages read, apart from the phases and the seeds."""
    return [
        change for change in changed_keys(run, other)
        if not change.path.startswith("train.phases") and change.path not in _MAY_DIFFER
        and (change.path == _MEASURE or any(stage in readers(key) for key in change.keys for stage in stages))
    ]  # fmt: skip


def _distinct_phases(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The phases that train on other data than the phase before, by name, without their batch size."""
    found: dict[str, dict[str, Any]] = {}
    for phase in recipe.train.phases:
        data = {key: value for key, value in _data_of(phase).items() if key not in _OF_BATCH}
        data["mixture_changes"] = as_tree(phase)["mixture_changes"]
        if not found or data != found[next(reversed(found))]:
            found[phase.name] = data
    return found


def _data_of_phases(recipe: Recipe) -> list[dict[str, Any]]:
    return list(_distinct_phases(recipe).values())


def _data_of(phase: Phase) -> dict[str, Any]:
    """What a step of the phase trains on, and how, apart from its learning rate."""
    path = f"train.phases.{phase.name}"
    return {key: value for key, value in as_tree(phase).items() if key not in _OF_SCHEDULE and "pretrain" in readers(f"{path}.{key}")}


def corpus_of(recipe: Recipe) -> Path | None:
    """The run directory of a recipe, if a corpus was made in it."""
    assert recipe.run_dir
    run_dir = Path(recipe.run_dir)
    return run_dir if (run_dir / "corpus" / "manifest.json").is_file() else None
