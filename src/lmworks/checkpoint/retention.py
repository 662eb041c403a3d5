"""Which checkpoints are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from lmworks.errors import UserError
from lmworks.recipe.schema.checkpoints import Checkpoints as Options
from lmworks.recipe.schema.units import Duration


@dataclass(frozen=True)
class Saved:
    """The facts about a checkpoint that retention depends on. metric: lower is better. streak_began: the first of the bad steps or spikes
    in a row that it was saved after, None if the step before it was good."""

    path: Path
    step: int
    tokens: int
    metric: float | None
    permanent: bool
    streak_began: int | None = None


def keep(saved: list[Saved], options: Options, newest: int, total_tokens: int | None = None) -> dict[int, str]:
    """The steps to keep, each with the reason. `newest` is the step just saved, which always stays.

    keep_every keeps the first checkpoint in each interval, so that it also works when saves do not fall on its multiples. During bad steps
    or spikes in a row the last ones before the first of these stay too: a rollback leads there.
    """
    ordered = sorted(saved, key=lambda one: one.step)
    began = next((one.streak_began for one in ordered if one.step == newest), None)
    before = [] if began is None else [one for one in ordered if one.step <= began]
    reasons: dict[int, list[str]] = {}

    def add(one: Saved, reason: str) -> None:
        reasons.setdefault(one.step, []).append(reason)

    for one in ordered[-options.keep_last:]:
        add(one, "last")
    for one in before[-options.keep_last:]:
        add(one, "before bad steps")
    for one in ordered:
        if one.step == newest and one.step not in reasons:
            add(one, "newest")
        if one.permanent:
            add(one, "permanent")
    scored = [one for one in ordered if one.metric is not None and math.isfinite(one.metric)]
    if options.keep_best and scored:
        add(min(scored, key=lambda one: one.metric or 0.0), "best")
    if options.keep_every is not None:
        seen = {0}
        for one in ordered:
            interval = _position(one, options.keep_every, total_tokens)
            if interval not in seen:
                seen.add(interval)
                add(one, "every")
    return {step: ", ".join(why) for step, why in reasons.items()}


def _position(one: Saved, every: Duration, total_tokens: int | None) -> int:
    if every.unit == "steps":
        return one.step // max(1, int(every.value))
    if every.unit == "tokens":
        return one.tokens // max(1, int(every.value))
    if total_tokens is None:
        raise UserError(f"checkpoints.keep_every: {every.text()} of what? write it in steps or tokens")
    return one.tokens // max(1, every.tokens(step_tokens=1, phase_tokens=total_tokens))
