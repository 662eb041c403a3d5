"""Renaming and removing checkpoint directories: publish, set aside, prune, clean up."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from lmworks.checkpoint import listing
from lmworks.io.files import sync_directory
from lmworks.recipe.schema.artifacts import Checkpoints as Options


def publish(aside: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name and sync the parent directory. An older one of that name stays until the rename."""
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        os.replace(final, replaced)
    os.replace(aside, final)
    sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint to `step-00000100.WHY-1` (or -2 and so on), a name that readers ignore; returns the new path."""
    aside = listing.free_name(path, why)
    os.replace(path, aside)
    sync_directory(path.parent)
    return aside


def prune(
    directory: Path, options: Options, newest: int, total_tokens: int | None = None, protected: Collection[Path] = (), *, dry: bool = False
) -> list[int]:
    """Remove the checkpoints that the options do not keep, and return their steps. With `dry` nothing is removed.

    newest: the step that always stays. protected: paths that must not be removed yet.
    """
    found = listing.saved(directory)
    kept = listing.keep(found, options, newest, total_tokens)
    leaving = [one for one in found if one.step not in kept and one.path not in protected]
    for one in () if dry else leaving:
        gone = directory / f".{one.path.name}.gone"
        os.replace(one.path, gone)
        shutil.rmtree(gone, ignore_errors=True)
    return [one.step for one in leaving]


def clean(directory: Path) -> None:
    """Remove the remains of killed saves and prunings. Restore a checkpoint that was about to be replaced by another of its step."""
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        match = re.fullmatch(r"\.(step-\d+)\.(part|gone|replaced)", path.name)
        if match and match[2] == "replaced" and not (directory / match[1]).exists():
            os.replace(path, directory / match[1])
        elif match:
            shutil.rmtree(path, ignore_errors=True)


def do_nothing() -> None:
    """The work of the ranks that only take part in `Communicator.run_on_all`."""
