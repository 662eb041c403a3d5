"""Run directories: a run writes only into folders of its own, and each stage's folder has a stamp.

The stamp, `stage.json`, says what the stage was made from, what it has made, and how long it took.

Decides whether a stage has to run: compares its current inputs and outputs with those recorded in `stage.json`.

The inputs of a stage are the recipe values that it reads, the contents of the files of earlier stages that it names, and for the corpus the
files of the sources. Each input is recorded by name with a hash, so that a change can be reported by name. A stage is skipped if all its
inputs have the recorded hashes and all its outputs exist. `list_files` has the user's own files that a run reads: text, evaluation sets,
conversations, pairs, prompts, rewards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks import __version__
from lmworks.checkpoint import listing
from lmworks.corpus.read import snapshot
from lmworks.corpus.read.snapshot import Listing
from lmworks.errors import UserError
from lmworks.io.files import read_json, sha256_file, write_json
from lmworks.recipe.changes import Change, as_tree, canonical, readers
from lmworks.recipe.former import with_former_paths
from lmworks.recipe.keys import flatten, locate
from lmworks.recipe.load import load_resolved
from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.stages import STAGES, STAMP, Stage, stages_for
from lmworks.train.data.row_files import files_of
from lmworks.watch.ledger import LEDGER, is_lock

_OURS = ("recipe.yaml", "resolved.json", "sources.json", LEDGER, "metrics.jsonl", "samples.jsonl", "report.html")


def require_run(run_dir: Path) -> Recipe:
    """The resolved recipe of a run directory. Raises `UserError` if `run_dir` is not one."""
    path = run_dir / "resolved.json"
    if not path.exists():
        raise UserError(f"{run_dir} is not a run directory (no resolved.json); make one with: lmworks run RECIPE")
    return load_resolved(path)


def require_own_run_dir(run_dir: Path, recipe: str) -> None:
    """Raise `UserError` if the directory holds files that no run has written under names that a run would write.

    `recipe` is the text that the run would write as recipe.yaml."""
    try:
        taken = [name for name in _OURS if (run_dir / name).exists()]
    except OSError:  # taking the lock reports what is wrong with the path
        return
    lock = run_dir / "lock"
    if lock.is_file() and is_lock(lock):
        return  # every run creates it first
    if lock.exists():
        taken = ["lock"]
    elif {"resolved.json", LEDGER} & set(taken):
        return  # a copy of a run, or a launcher has already written to the ledger
    elif taken == ["recipe.yaml"] and (run_dir / taken[0]).read_text(encoding="utf-8", errors="replace") == recipe:
        return
    if taken:
        raise UserError(f"{run_dir} holds {taken[0]} and is not a run of lmworks; choose another directory with --set run_dir=PATH")


def require_own_folder(run_dir: Path, stage: Stage) -> None:
    """Raise `UserError` if the stage's folder is a symbolic link, or holds files that no run has written."""
    folder = run_dir / stage.folder
    if folder.is_symlink():
        raise UserError(
            f"{folder} is a link to {folder.resolve()}, which belongs to another run and would be overwritten: "
            "choose another run_dir, or replace the link by a copy"
        )
    if folder.exists() and not (folder / STAMP).is_file():
        own = (f".{STAMP}.", "step-", ".step-", "ewc-") if stage.name == "pretrain" else (f".{STAMP}.",)  # checkpoints may come from a copy
        stranger = next((path for path in _entries(folder) if not path.name.startswith(own)), None)
        if stranger is not None:
            raise UserError(
                f"{folder} holds {stranger.name} and was not made by lmworks; nothing in it was changed: move it away, or choose another "
                "directory with --set run_dir=PATH"
            )


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a directory; move it away, or choose another directory with --set run_dir=PATH")
    return sorted(folder.iterdir())


def read_stamp(folder: Path) -> dict[str, Any] | None:
    """The stamp in a stage's folder: None if there is none, empty if it is not readable. An invalidated stamp has no `done`."""
    path = folder / STAMP
    if not path.exists():
        return None
    try:
        record = read_json(path)
    except UserError:
        return {}
    return record if isinstance(record, dict) and "stage" in record else {}


def write_stamp(folder: Path, stage: Stage, known: Mapping[str, str], seconds: float | None = None) -> None:
    """Record that the stage has begun or, with `seconds`, that it has ended and what it has made."""
    record: dict[str, Any] = {"stage": stage.name, "version": __version__, "done": seconds is not None, "inputs": dict(known)}
    if seconds is not None:
        record |= {"seconds": round(seconds, 1), "outputs": stage_outputs(folder, stage)}
    write_json(folder / STAMP, record)


def invalidate_stamp(folder: Path, stage: Stage) -> bool:
    """Mark the stage as not done; its folder stays ours. Returns whether it had been started."""
    record = read_stamp(folder)
    if not record or "done" not in record:
        return False
    write_json(folder / STAMP, {"stage": stage.name, "version": __version__})
    return True


def stage_outputs(folder: Path, stage: Stage) -> dict[str, int]:
    """Size in bytes of each output file of the stage."""
    found: dict[str, int] = {}
    for pattern in stage.makes:
        newest = listing.directories(folder / pattern)[-1:] if pattern.endswith("/") else []
        paths = newest[0].iterdir() if newest else () if pattern.endswith("/") else folder.glob(pattern)
        found |= {str(path.relative_to(folder)): path.stat().st_size for path in sorted(paths) if path.is_file() and path.name != STAMP}
    return found


def seconds_by_stage(run_dir: Path) -> dict[str, float | None]:
    """Seconds of the last run of each stage; None if it has not ended."""
    paths = {stage.name: run_dir / stage.folder / STAMP for stage in STAGES}
    return {name: read_json(path).get("seconds") if path.exists() else None for name, path in paths.items()}


def list_files(recipe: Recipe, before: Listing) -> Listing:
    """The current files by recipe path: those of the corpus and the evaluation by size and time, those of tuning and alignment by contents,
    so that a copy of a run on another machine is not tuned again. Files that cannot be listed now keep their listing of `before`."""
    found = snapshot.list_files(recipe, before)
    for name, path, file in _tuning_sets(recipe):
        try:
            paths = [*(files_of(name, Path(path)) if path else ()), *([Path(file)] if file else ())]
            found[name] = {str(one): [one.stat().st_size, int(sha256_file(one)[:12], 16)] for one in paths}
        except (UserError, OSError):
            if name in before:
                found[name] = before[name]
    return found


def _tuning_sets(recipe: Recipe) -> Iterator[tuple[str, str | None, str | None]]:
    """Recipe path of each set of conversations, pairs or prompts with files, the path of its rows, and the file of its reward."""
    for stage in ("tune", "dpo", "grpo"):
        for data in getattr(getattr(recipe, stage), "data", ()):
            path, file = data.path if data.kind == "files" else None, getattr(data, "file", None)
            if path or file:
                yield f"{stage}.data.{data.name}", path, file


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
    before: dict[str, str | None] = record.get("inputs", {})
    if not before.keys() <= expected.keys():
        before = with_former_paths(before, as_tree(recipe), _hash)
    before = {name: _default(recipe, name) for name in expected.keys() - before.keys()} | before
    changed = tuple(name for name in {**expected, **before} if expected.get(name) != before[name])
    lost = tuple(_lost(folder, stage, recipe, record.get("outputs", {}))) if record["done"] else ()
    return StaleReason(changed=changed, stopped=not record["done"], lost=lost)


def _default(recipe: Recipe, name: str) -> str | None:
    """The hash of the default of a key of the recipe: what an earlier version that lacked the key computed. None for a key without one."""
    keys = locate(as_tree(recipe), name)
    node: Any = recipe
    for key in keys[:-1]:
        node = node[key] if isinstance(key, int) else getattr(node, key, None)
    field = type(node).model_fields.get(str(keys[-1])) if isinstance(node, Node) else None
    if field is None or field.is_required():
        return None
    assumed = node.model_copy(update={str(keys[-1]): field.get_default(call_default_factory=True)})
    return _hash(as_tree(assumed)[str(keys[-1])])


def _lost(folder: Path, stage: Stage, recipe: Recipe, outputs: Mapping[str, int]) -> Iterator[str]:
    remote = stage.name == "shards" and recipe.shards.cache is not None and recipe.shards.cache.remote is not None
    for name, size in outputs.items():
        if remote and name.startswith(("train/", "validation/")):  # these are read from the remote copy
            continue
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            yield f"{stage.folder}/{name}"
