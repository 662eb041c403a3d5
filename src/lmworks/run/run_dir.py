"""Checks that a directory is a run directory, and that a run writes only into folders of its own."""

from __future__ import annotations

from pathlib import Path

from lmworks.errors import UserError
from lmworks.recipe.loading.load import load_resolved
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.stages import STAMP, Stage
from lmworks.watch.ledger import LEDGER
from lmworks.watch.lock import is_lock

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
