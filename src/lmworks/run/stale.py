"""Why a stage is done, or done again: what it is made from, as `stage.json` in its folder remembers it, and what is there of what it made.

A stage's inputs are the recipe's values that it reads, the contents of the files of earlier stages that it names, and for the corpus
the sources' files. Each is remembered by a hash, so that a change can be told by its name. A stage whose inputs hash the same and whose
files are there is not done again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks import __version__
from lmworks.checkpoint import listing
from lmworks.corpus.readers.snapshot import Listing
from lmworks.errors import UserError
from lmworks.files import read_json, sha256_file, write_json
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tree.effects import readers
from lmworks.recipe.tree.fingerprint import Change, as_tree, canonical
from lmworks.recipe.tree.paths import flatten
from lmworks.run.stages import STAMP, Stage, stages_for
from lmworks.watch.lock import is_lock

_NAMED = 6


@dataclass(frozen=True)
class Why:
    """Why a stage is not done: nothing is known of it, its inputs have `changed`, it was stopped, or files that it made are `lost`."""

    new: bool = False
    changed: tuple[str, ...] = ()
    stopped: bool = False
    lost: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.new or self.stopped or bool(self.changed) or bool(self.lost)

    def text(self, changes: Sequence[Change] = ()) -> str:
        """In words, with the old and new values where `changes` has them; empty where nothing is done again."""
        if not self.changed and not self.lost:
            return ""
        said = {key: str(change) for change in changes for key in change.keys}
        words = [*dict.fromkeys(said.get(name, f"{name} has changed") for name in self.changed), *(f"{name} is lost" for name in self.lost)]
        return "; ".join(words[:_NAMED]) + (f"; and {len(words) - _NAMED} more" if len(words) > _NAMED else "")


def values_of(recipe: Recipe) -> dict[str, Any]:
    """Every value of a recipe by its dotted path, and under `train.phases` the order of the phases, which the paths do not tell."""
    return flatten(as_tree(recipe)) | {"train.phases": phases(recipe)}


def phases(recipe: Recipe) -> list[str]:
    """The names of the phases, in order."""
    return [phase.name for phase in recipe.train.phases]


def inputs(stage: Stage, recipe: Recipe, run_dir: Path, files: Listing, values: Mapping[str, Any] | None = None) -> dict[str, str]:
    """By name, a hash of each thing that the stage is made from, as it is now."""
    values = values_of(recipe) if values is None else values
    found = {path: _hash(value) for path, value in values.items() if stage.name in readers(path)}
    found |= {f"{name}.files": _hash(listed) for name, listed in files.items() if stage.name in readers(name)}
    there = {one.folder for one in stages_for(recipe)}
    return found | {need: _content(run_dir, need) for need in stage.needs if need.partition("/")[0] in there}


def _hash(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()[:16]


def _content(run_dir: Path, need: str) -> str:
    """Hash of a file's content, or of the tensors of the newest checkpoint in a folder; empty where there is none."""
    path = run_dir / need
    if not need.endswith("/"):
        return sha256_file(path)[:16] if path.is_file() else ""
    return listing.content(path)


def why(stage: Stage, recipe: Recipe, run_dir: Path, expected: Mapping[str, str]) -> Why:
    """Why the stage has to be done, given its inputs; false where it is done."""
    folder = run_dir / stage.folder
    record = remembered(folder)
    if record is None or (record and "done" not in record):
        return Why(new=True)
    if not record:
        return Why(lost=(f"{stage.folder}/{STAMP}",))
    before: dict[str, str] = record.get("inputs", {})
    changed = tuple(name for name in {**expected, **before} if expected.get(name) != before.get(name))
    lost = tuple(_lost(folder, stage, recipe, record.get("outputs", {}))) if record["done"] else ()
    return Why(changed=changed, stopped=not record["done"], lost=lost)


def _lost(folder: Path, stage: Stage, recipe: Recipe, outputs: Mapping[str, int]) -> Iterator[str]:
    far = stage.name == "shards" and recipe.shards.cache is not None and recipe.shards.cache.remote is not None
    for name, size in outputs.items():
        if far and name.startswith(("train/", "validation/")):  # their copy far away is what is read
            continue
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            yield f"{stage.folder}/{name}"


def remembered(folder: Path) -> dict[str, Any] | None:
    """What is known of the last try of a folder's stage; None if nothing is, and nothing in it if that is not readable. It has no `done`
    where the try was taken back."""
    path = folder / STAMP
    if not path.exists():
        return None
    try:
        record = read_json(path)
    except UserError:
        return {}
    return record if isinstance(record, dict) and "stage" in record else {}


def forget(folder: Path, stage: Stage) -> bool:
    """Take back what is known of the stage, whose folder stays ours; whether there was anything."""
    record = remembered(folder)
    if not record or "done" not in record:
        return False
    write_json(folder / STAMP, {"stage": stage.name, "version": __version__})
    return True


def remember(folder: Path, stage: Stage, known: Mapping[str, str], seconds: float | None = None) -> None:
    """Write down that the stage has begun, or with `seconds` that it has ended, and what it has made."""
    record: dict[str, Any] = {"stage": stage.name, "version": __version__, "done": seconds is not None, "inputs": dict(known)}
    if seconds is not None:
        record |= {"seconds": round(seconds, 1), "outputs": outputs(folder, stage)}
    write_json(folder / STAMP, record)


def outputs(folder: Path, stage: Stage) -> dict[str, int]:
    """Bytes of each file that the stage has made and others read."""
    found: dict[str, int] = {}
    for pattern in stage.makes:
        newest = listing.directories(folder / pattern)[-1:] if pattern.endswith("/") else []
        paths = newest[0].iterdir() if newest else () if pattern.endswith("/") else folder.glob(pattern)
        found |= {str(path.relative_to(folder)): path.stat().st_size for path in sorted(paths) if path.is_file() and path.name != STAMP}
    return found


def require_own(run_dir: Path, stage: Stage) -> None:
    """Raise `UserError` if the stage's folder is a link, or holds files that no run has put there."""
    folder = run_dir / stage.folder
    if folder.is_symlink():
        raise UserError(
            f"{folder} is a link to {folder.resolve()}, which another run made and reads; what was asked for would be made in its place: "
            "choose another run_dir, or replace the link by a copy"
        )
    if folder.exists() and not (folder / STAMP).is_file():
        own = (f".{STAMP}.", "step-", ".step-", "ewc-") if stage.name == "pretrain" else (f".{STAMP}.",)  # checkpoints may come from a copy
        stranger = next((path for path in _entries(folder) if not path.name.startswith(own)), None)
        if stranger is not None:
            raise UserError(
                f"{folder} holds {stranger.name} and was not made by lmworks; nothing of it was touched: move it away, or choose another "
                "directory with --set run_dir=PATH"
            )


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a directory; move it away, or choose another directory with --set run_dir=PATH")
    return sorted(folder.iterdir())


_OURS = ("recipe.yaml", "resolved.json", "sources.json", "ledger.jsonl", "metrics.jsonl", "samples.jsonl", "report.html")


def require_own_directory(run_dir: Path, recipe: str) -> None:
    """Raise `UserError` if files of somebody else lie in the run directory under names that a run would write; `recipe` is the text that it
    would write as recipe.yaml."""
    try:
        taken = [name for name in _OURS if (run_dir / name).exists()]
    except OSError:  # whoever takes the lock says what is wrong with the path
        return
    lock = run_dir / "lock"
    if lock.is_file() and is_lock(lock):
        return  # every run begins with it
    if lock.exists():
        taken = ["lock"]
    elif {"resolved.json", "ledger.jsonl"} & set(taken):
        return  # a copy of a run; or a launcher has written a first line
    elif taken == ["recipe.yaml"] and (run_dir / taken[0]).read_text(encoding="utf-8", errors="replace") == recipe:
        return
    if taken:
        raise UserError(f"{run_dir} holds {taken[0]} and is no run of lmworks; choose another directory with --set run_dir=PATH")
