"""Which changes of a finding a run can make: a rule proposes them from a few numbers, and the run's own recipe has the last word."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.changes import as_tree
from lmworks.recipe.checks import problems
from lmworks.recipe.derive import derive_missing
from lmworks.recipe.document import parse_value
from lmworks.recipe.keys import get, locate, put
from lmworks.recipe.schema.recipe import Recipe
from lmworks.watch.evidence import Evidence, quantity
from lmworks.watch.rule import Change, Finding

_REFUSED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)  # a recipe that is refused, or that no version wrote
NONE_LEFT = "the usual changes are made already, or this recipe refuses them; what else helps: lmworks doctor --explain "


def offered(evidence: Evidence, finding: Finding) -> Finding:
    """A finding with those of its changes that the run's recipe accepts and that move a value, in the direction that they say. Unchanged
    if the recipe itself cannot be read, as that of another version."""
    if not any(one.key for one in finding.changes):
        return finding
    try:
        now = _resolved(evidence.tree)
    except _REFUSED:
        return finding
    kept = [one for one in finding.changes if not one.key or _helps(one, evidence.tree, now)]
    return replace(finding, changes=kept or [Change(advice=f"{NONE_LEFT}{finding.code}")])


def _helps(change: Change, tree: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    changed = copy.deepcopy(dict(tree))
    try:
        keys = locate(changed, change.key)
        put(changed, keys, parse_value(change.value, change.key))
        after, before = get(_resolved(changed), keys), get(now, keys)
    except _REFUSED:
        return False
    if after == before:
        return False
    old, new = quantity(before), quantity(after)  # NaN where there is no number to compare with
    return not (new < old if change.moves == "up" else new > old if change.moves == "down" else False)


def _resolved(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a recipe with everything that follows. Raises `UserError` with the first reason against it. Reads no file: the shape of
    the model is known."""
    recipe, _ = derive_missing(Recipe.model_validate(tree), Path())
    for _, message in problems(recipe):
        raise UserError(message)
    found: dict[str, Any] = as_tree(recipe)
    return found
