"""The learning rate jumps at a resume, or is not the one that the recipe prescribes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, Rule

_JUMP = 1.2
"""Factor between the rates of two neighboring steps. A warm-up of 50 steps rises by 2% of the peak in each; sound resumes: exactly 1."""
_OFF = 0.01
"""Relative difference of the recorded rates from the recipe's. The same function computes both, so it is 0 up to rounding."""
_LEARNING_RATE_KEYS = (
    "learning_rate",
    "lr_schedule",
    "learning_rate_scale",
    "batch_ramp",
    "global_batch_tokens",
    "tokens",
    "layer_lr_decay",
)
_RATES = ("optim/learning_rate", "optim/adam_learning_rate")
_EXACT = "the schedule is a function of the step and the recipe"


def _check(evidence: Evidence) -> Finding | None:
    return _jump_at_resume(evidence) or _other_than_planned(evidence)


def _jump_at_resume(evidence: Evidence) -> Finding | None:
    phases = {step for step, _ in evidence.phase_starts() if step}
    for step in evidence.resumes:
        jump, name = _jump(evidence, step)
        if step in phases or not jump > _JUMP:
            continue
        keys = _changed_keys(evidence, step)
        planned = trends.planned_rates(evidence, np.array([step, step + 1]))
        if not keys and planned is not None and min(planned) > 0 and abs(math.log(planned[1] / planned[0])) > math.log(_JUMP):
            continue  # the recipe itself jumps here: a milestone, a short warm-up
        return Finding(
            [
                Measurement(f"factor on {name} from step {step} to the next", jump, high=_JUMP, source=_EXACT),
                Measurement("keys of the schedule that were changed before it, in the ledger", len(keys), high=0, source="recipe_changed"),
            ],
            steps=(step, evidence.step),
            exact=bool(keys) or planned is not None,
            where=", ".join(f"{key}: {old} to {new}" for key, old, new in keys)[:300],
            excluded=[Exclusion("optimizer-state-lost", f"the recorded rate changes by a factor of {jump:.3g} at the resume")],
            changes=_changes(evidence, step, keys),
            check_afterwards=f"{name} at step {step + 1} is that of step {step}, within a few per cent",
            next_measurement=f"the recipes of both runs: lmworks show {evidence.files.label}/recipe.yaml",
        )
    return None


def _jump(evidence: Evidence, step: int) -> tuple[float, str]:
    """The largest factor by which a rate changes over a resume, up or down, and its metric."""
    found: list[tuple[float, str]] = []
    for event in evidence.of("resumed_step"):
        now, then = _number(event.get("learning_rate")), _number(event.get("saved_learning_rate"))
        if event.get("step") == step and now > 0 and then > 0:
            found.append((math.exp(abs(math.log(now / then))), _RATES[0]))
    for name in _RATES:
        rates = evidence.series(name).finite
        before, after = rates.between(0, step + 1), rates.between(step + 1, step + 3)
        if len(before) and len(after) and before.last > 0 and after.first > 0 and before.steps[-1] >= step - 1:
            found.append((math.exp(abs(math.log(after.first / before.last))), name))
    return max(found, default=(math.nan, _RATES[0]))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _changed_keys(evidence: Evidence, step: int) -> list[tuple[str, Any, Any]]:
    """The keys that were changed by name between the former process and this resume."""
    found: list[tuple[str, Any, Any]] = []
    for event in evidence.events:
        if event["event"] == "recipe_changed":
            found = [
                _as_change(one) for one in event.get("allowed", ()) if str(one.get("key", "")).rpartition(".")[2] in _LEARNING_RATE_KEYS
            ]
        elif event["event"] == "resume":
            if event.get("step") == step:
                return found
            found = []
    return []


def _as_change(one: Mapping[str, Any]) -> tuple[str, Any, Any]:
    return str(one.get("key")), one.get("old"), one.get("new")


def _changes(evidence: Evidence, step: int, keys: list[tuple[str, Any, Any]]) -> list[Change]:
    cost = f"the steps since {step}: lmworks ckpt rollback {evidence.files.label} STEP, then run it again"
    if not keys:
        return [Change(advice="roll back to before the resume, and resume with the recipe that the run began with", cost=cost)]
    return [Change(key, str(old), "as before the resume", cost=cost) for key, old, _ in keys]


def _other_than_planned(evidence: Evidence) -> Finding | None:
    """Recorded rates that the recipe does not give, since it was last changed."""
    rates = trends.rate(evidence).between(max([0, *evidence.resumes]) + 1, math.inf)
    scale = evidence.number("optimizer.layer_lr_decay")
    if len(rates) < 3 or not evidence.has("train/phase") or scale != 1.0:
        return None  # a session, in which the caller sets the rate; or groups of several rates
    planned = trends.planned_rates(evidence, rates.steps)
    if planned is None:
        return None
    lowered = _lowered_after_spikes(evidence, rates.steps)
    off = np.abs(rates.values - planned) / np.maximum(planned, 1e-12) > _OFF
    off &= ~lowered
    if off.mean() < 0.1 or off.sum() < 3:
        return None
    wrong = rates.steps[off]
    factor = float(np.median(rates.values[off] / np.maximum(planned[off], 1e-12)))
    return Finding(
        [
            Measurement("share of the lines whose rate is not the recipe's", float(off.mean()), high=0.0, source=_EXACT),
            Measurement("recorded rate over the recipe's", factor, low=1 - _OFF, high=1 + _OFF, source=_EXACT),
        ],
        steps=(int(wrong[0]), int(wrong[-1])),
        exact=True,
        changes=[
            Change(
                advice="resume with the recipe of this run directory, and no program that sets the rate by itself",
                cost=f"the steps since {int(wrong[0])}: lmworks ckpt rollback",
            )
        ],
        check_afterwards="optim/learning_rate equals the curve of lmworks show",
    )


def _lowered_after_spikes(evidence: Evidence, steps: np.ndarray) -> np.ndarray:
    """The lines at which stability.spike.action: reduce_lr has lowered the rate."""
    span = evidence.number("stability.spike.reduced_lr_steps")
    found = np.zeros(len(steps), bool)
    for event in evidence.of("spike"):
        if event.get("action") == "reduce_lr" and isinstance(event.get("step"), int):
            found |= (steps > event["step"]) & (steps <= event["step"] + span + 2)
    return found


RULE = Rule(
    "schedule-changed",
    "The learning rate is not the one that the run began with.",
    "checkpoints",
    ("resume", "spikes"),
    _check,
    "A schedule that is rebuilt with another length or peak at a resume makes the rate jump at that step (OneTrainer#1604, prime-rl#1095); "
    "one that advances once per micro-batch ends at steps / N (accelerate#2926). Here the rate is a function of step and recipe, "
    "and a change of the recipe has to be allowed by name and stands in the ledger; so the recorded rates can be compared with the recipe.",
    needs=("optim/learning_rate",),
    look_alikes={"optimizer-state-lost": "the rate is the same before and after"},
    outranks=("optimizer-state-lost",),
)
