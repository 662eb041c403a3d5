"""Decides whether a stage has to run: compares its current inputs and outputs with those recorded in `stage.json`.

The inputs of a stage are the recipe values that it reads, the contents of the files of earlier stages that it names, and for the corpus
the files of the sources. Each input is recorded by name with a hash, so that a change can be reported by name. A stage is skipped if all
its inputs have the recorded hashes and all its outputs exist.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.checkpoint import listing
from lmworks.corpus.readers.snapshot import Listing
from lmworks.files import sha256_file
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tree.effects import readers
from lmworks.recipe.tree.fingerprint import Change, as_tree, canonical
from lmworks.recipe.tree.paths import flatten
from lmworks.run.stages import STAMP, Stage, stages_for
from lmworks.run.stamps import read_stamp

_NAMED = 6


@dataclass(frozen=True)
class StaleReason:
    """Why a stage has to run: it never ran, its inputs have `changed`, it was stopped, or files that it made are missing (`lost`)."""

    new: bool = False
    changed: tuple[str, ...] = ()
    stopped: bool = False
    lost: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.new or self.stopped or bool(self.changed) or bool(self.lost)

    def text(self, changes: Sequence[Change] = ()) -> str:
        """The reason in words, with old and new values where `changes` has them; empty if nothing is repeated."""
        if not self.changed and not self.lost:
            return ""
        said = {key: str(change) for change in changes for key in change.keys}
        words = [*dict.fromkeys(said.get(name, f"{name} has changed") for name in self.changed)]
        words += [f"{name} is missing" for name in self.lost]
        return "; ".join(words[:_NAMED]) + (f"; and {len(words) - _NAMED} more" if len(words) > _NAMED else "")


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """Every value of a recipe by its dotted path; `train.phases` has the order of the phases, which the paths do not show."""
    return flatten(as_tree(recipe)) | {"train.phases": phase_names(recipe)}


def phase_names(recipe: Recipe) -> list[str]:
    """The names of the phases, in order."""
    return [phase.name for phase in recipe.train.phases]


def stage_inputs(stage: Stage, recipe: Recipe, run_dir: Path, files: Listing, values: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Current hash of each input of the stage, by name."""
    values = recipe_values(recipe) if values is None else values
    found = {path: _hash(value) for path, value in values.items() if stage.name in readers(path)}
    found |= {f"{name}.files": _hash(listed) for name, listed in files.items() if stage.name in readers(name)}
    there = {one.folder for one in stages_for(recipe)}
    return found | {need: _content(run_dir, need) for need in stage.needs if need.partition("/")[0] in there}


def _hash(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()[:16]


def _content(run_dir: Path, need: str) -> str:
    """Hash of a file, or of the tensors of the newest checkpoint in a folder; empty if it does not exist."""
    path = run_dir / need
    if not need.endswith("/"):
        return sha256_file(path)[:16] if path.is_file() else ""
    return listing.content(path)


def stale_reason(stage: Stage, recipe: Recipe, run_dir: Path, expected: Mapping[str, str]) -> StaleReason:
    """Why the stage has to run, given the hashes of its inputs; false if it is done."""
    folder = run_dir / stage.folder
    record = read_stamp(folder)
    if record is None or (record and "done" not in record):
        return StaleReason(new=True)
    if not record:
        return StaleReason(lost=(f"{stage.folder}/{STAMP}",))
    before: dict[str, str] = record.get("inputs", {})
    changed = tuple(name for name in {**expected, **before} if expected.get(name) != before.get(name))
    lost = tuple(_lost(folder, stage, recipe, record.get("outputs", {}))) if record["done"] else ()
    return StaleReason(changed=changed, stopped=not record["done"], lost=lost)


def _lost(folder: Path, stage: Stage, recipe: Recipe, outputs: Mapping[str, int]) -> Iterator[str]:
    remote = stage.name == "shards" and recipe.shards.cache is not None and recipe.shards.cache.remote is not None
    for name, size in outputs.items():
        if remote and name.startswith(("train/", "validation/")):  # these are read from the remote copy
            continue
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            yield f"{stage.folder}/{name}"
