"""Fingerprints of recipes, and what a resumed run may change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel

from lmworks.errors import UserError
from lmworks.recipe.paths import flat, get, locate

HARMLESS = (
    "run_dir",
    "size",
    "corpus.processes",
    "corpus.executor.*",
    "corpus.keep_staged",
    "train.log_every",
    "train.sample_every",
    "train.validate_every",
    "train.validate_bytes_per_domain",
    "train.phases*.needle",
    "train.save_every",
    "train.seconds_between_saves",
    "shards.cache",
    "shards.cache.*",
    "shards.warn_epochs",
    "checkpoints.*",
    "metrics.*",
    "stability.save_bad_batches",
    "stability.starved_share",
    "stability.data_timeout",
    "stability.max_failed_saves",
    "stability.slow_threshold",
    "stability.recheck_every",
    "stability.on_corruption",
    "tune",
    "tune.*",
    "evaluate.benchmark_items",
    "evaluate.task*",
    "evaluate.references",
    "export.*",
    "launch.*",
)
"""Keys that never reach a weight of pretraining: a resume under a change of these alone is exact.

`evaluate.benchmarks` is not here: the corpus is decontaminated against them.
`threads`, `train.micro_batch`, `train.compile` and `layout` are not here: they change the order of float additions.
"""


def as_tree(recipe: BaseModel | dict[str, Any]) -> dict[str, Any]:
    """The recipe (or a node of it) as plain JSON values; quantities as text with their unit."""
    return recipe.model_dump(mode="json") if isinstance(recipe, BaseModel) else recipe


def canonical(value: Any) -> bytes:
    """One and only one JSON text per value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def fingerprint(recipe: BaseModel | dict[str, Any], paths: Iterable[str] | None = None) -> str:
    """Hex SHA-256 of the whole resolved recipe, or of the sub-trees at `paths` (dotted; the order does not matter).

    A stage stamps what it makes with the fingerprint of the paths that it reads, so that other changes do not undo it.
    """
    tree = as_tree(recipe)
    if paths is not None:
        tree = {path: get(tree, locate(tree, path)) for path in paths}
    return hashlib.sha256(canonical(tree)).hexdigest()


@dataclass(frozen=True)
class Change:
    """One key whose value differs between two recipes; None where it is absent."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path} ({_short(self.old)} -> {_short(self.new)})"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def changed_keys(old: BaseModel | dict[str, Any], new: BaseModel | dict[str, Any]) -> list[Change]:
    """Every leaf that differs, by dotted path, in the order of the new recipe and then what only the old one has."""
    before, after = flat(as_tree(old)), flat(as_tree(new))
    return [Change(path, before.get(path), after.get(path)) for path in {**after, **before} if before.get(path) != after.get(path)]


def harmless(path: str) -> bool:
    """Whether a change of this key leaves a resumed run exact."""
    return any(fnmatchcase(path, pattern) for pattern in HARMLESS)


def require_allowed(changes: Sequence[Change], allowed: Sequence[str] = ()) -> list[Change]:
    """The changes that matter, if each is allowed by name (itself, or a node above it); for the ledger.

    Raises `UserError` naming the others and how to allow them. Harmless changes are dropped.
    """
    matter = [change for change in changes if not harmless(change.path)]
    refused = [c for c in matter if not any(c.path == name or c.path.startswith(name + ".") for name in allowed)]
    if refused:
        named = ", ".join(map(str, refused[:8])) + (f" and {len(refused) - 8} more" if len(refused) > 8 else "")
        flags = " ".join(f"--allow {change.path}" for change in refused)
        raise UserError(f"the recipe changed since this run began: {named}; undo it, choose another run_dir, or go on with {flags}")
    return matter
