"""The noise floors of an earlier ablation. They count only for the recipe and the budget that they were measured with, so its results
state both."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmworks.ablate.measures import Measure
from lmworks.ablate.run_set import Arm
from lmworks.errors import UserError
from lmworks.files import read_json
from lmworks.recipe.schema.effect import StageName
from lmworks.recipe.tree.effects import readers
from lmworks.recipe.tree.fingerprint import canonical
from lmworks.run.staleness import recipe_values

CONDITIONS = "noise_conditions"
_SEEDS = ("train.seed", "train.init_seed")  # a floor is about what these change
_SAMPLES = ("train.validate_bytes_per_domain", "evaluate.every_items")  # no weight depends on them, but the noise of what is measured
_SHOWN = 3


def conditions(baseline: Arm) -> dict[str, Any]:
    """What a noise floor holds for: the training tokens of a run, and a hash of each recipe value of the baseline that a stage reads."""
    values = {
        path: hashlib.sha256(canonical(value)).hexdigest()[:16]
        for path, value in recipe_values(baseline.recipe).items()
        if (readers(path) or path in _SAMPLES) and path not in _SEEDS and not _is_budget(path)
    }
    return {"tokens": baseline.tokens - baseline.started_at, "recipe": values}


def _is_budget(path: str) -> bool:
    return path.startswith("train.phases.") and path.endswith(".tokens")


def read_floors(
    folder: Path, name: str, baseline: Arm, measures: Sequence[Measure], stages: Sequence[StageName], needs_all: bool
) -> dict[str, Any]:
    """The noise floors by measure in `folder`/`name`, for runs of the baseline up to `stages`.

    Raises `UserError` if they were measured with another recipe or budget, or lack a measure: one of them if the ablation `needs_all`,
    because it has one seed, else every one.
    """
    path = folder.expanduser() / name
    document = read_json(path)
    try:
        floors = {measure: {kind: one["noise"][kind] for kind in ("paired", "unpaired")} for measure, one in document["measures"].items()}
        known = [measure for measure, one in floors.items() if any(noise["df"] for noise in one.values())]
        there: Mapping[str, Any] | None = document.get(CONDITIONS)
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"noise: {path} is not the result of an ablation; name the directory of one") from None
    if there is None:
        raise UserError(f"noise: {path} is of a version that did not record its recipe; run its lmworks ablate command again to add it")
    _require_equal(folder, there, conditions(baseline), stages)
    missing = [measure.name for measure in measures if measure.name not in known]
    if missing and (needs_all or len(missing) == len(measures)):
        raise UserError(
            f"noise: {folder} has no noise floor of {missing[0]}; add it to the measures there and run that ablation again, or leave it out"
        )
    return floors


def _require_equal(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any], stages: Sequence[StageName]) -> None:
    own = f"make a noise floor of this one with kind: noise and budget: {here['tokens']} tokens"
    if there["tokens"] != here["tokens"]:
        raise UserError(f"noise: the runs of {folder} have {there['tokens']:,} training tokens, and these have {here['tokens']:,}; {own}")
    before, after = there["recipe"], here["recipe"]
    other = [
        path for path in {**after, **before}
        if before.get(path) != after.get(path) and (path in _SAMPLES or set(readers(path)) & set(stages))
    ]  # fmt: skip
    if other:
        more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
        raise UserError(f"noise: the baseline of {folder} has another recipe ({', '.join(other[:_SHOWN])}{more}); {own}")
