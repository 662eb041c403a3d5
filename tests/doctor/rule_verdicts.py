"""What the rules find in a written run: for tables of signatures that must be named and look-alikes that must not."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.io.run_layout import of_stage
from lmworks.recipe.load import load_recipe_text
from lmworks.watch.diagnosis import all_rules
from lmworks.watch.evidence import Evidence
from lmworks.watch.offers import NONE_LEFT, offered
from lmworks.watch.rule import Finding, NotJudged
from lmworks.watch.run_files import open_run
from written_run import RECIPE, write_run

STEPS = 200


def judge(folder: Path, code: str, stage: str = "pretrain", **run: Any) -> Finding | str | None:
    """What the rule with a code finds in a run that is written with `run`; why it could not judge, as text."""
    evidence = Evidence(open_run(write_run(folder / f"run-{len(list(folder.iterdir()))}", stage=stage, **run)), of_stage(stage))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # a mean of nothing, which a user would see
            found = all_rules()[code].judge(evidence)
    except NotJudged as reason:
        return str(reason)
    if found is not None:
        assert found.changes and found.check_afterwards and found.excluded, f"{code} says less than a finding must"
        assert found.note or found.sure or found.next_measurement
        assert not any(math.isnan(one.value) for one in found.evidence), "what was not measured is shown"
        found = offered(evidence, found)
        for change in found.changes:
            assert change.key or change.advice
            assert NONE_LEFT not in change.advice, "a recipe that has the cause has a change that mends it"
            if change.key:  # a change that the recipe refuses helps nobody
                load_recipe_text(RECIPE, [*run.get("overrides", ()), f"{change.key}={change.value}"])
    return found


def verdict(found: Finding | str | None) -> str:
    """In a word: named, unsure, note, silent, or not judged."""
    if found is None:
        return "silent"
    if isinstance(found, str):
        return "not judged"
    return "note" if found.note else "named" if found.sure else "unsure"


def falling(first: float = 6.0, last: float = 3.5, count: int = STEPS, noise: float = 0.03, seed: int = 0) -> np.ndarray:
    """A loss curve: fast at first, then slower, with noise of each step."""
    at = np.linspace(0, 1, count)
    return last + (first - last) * np.exp(-5 * at) + np.random.default_rng(seed).normal(0, noise, count)


def at_validations(values: np.ndarray | list[float], count: int = STEPS) -> dict[int, float]:
    """Values for a metric that is only in some of `count` lines, evenly spread, the last line among them."""
    places = [round((number + 1) * count / len(values)) for number in range(len(values))]
    return dict(zip(places, map(float, values), strict=True))
