"""One corpus, one tokenizer and one set of shards for all arms that would make the same.

The data of a set of runs lie in `OUT/data/KEY/`, one directory for each combination of recipe values that the data stages read. A stage is
taken from another directory, by hard links, where `lmworks.run.run_dir` finds that it was made from equal inputs: from another KEY, from
the recipe's own run, or from the run of a checkpoint that is continued. Otherwise it is run. Each run of an arm then gets hard links to all
three. Files of a stage are always replaced by a rename and never written in place, so a link cannot change the original.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lmworks.ablate.run_set import DATA_STAGES, Arm, Run, RunSet
from lmworks.checkpoint import listing
from lmworks.corpus.read.snapshot import list_files as source_files
from lmworks.io.files import explain_os_errors, link_tree, try_lock
from lmworks.recipe.load import load_recipe
from lmworks.run.run_dir import read_stamp, stage_inputs, stale_reason
from lmworks.run.runner import StageEvent, run_stages
from lmworks.run.stages import STAGES

_STAGES = [stage for stage in STAGES if stage.name in DATA_STAGES]
_POLL = 1.0


def prepare_data(runs: RunSet, on_event: Callable[[StageEvent], None], on_wait: Callable[[str], None]) -> None:
    """Make the data of all arms, the baseline's first. Several processes may call it; each directory is made by one of them."""
    made: list[Path] = []
    for arm in (runs.baseline, *runs.arms.values()):
        directory = runs.data_dir(arm)
        if directory not in made:
            with only_one(directory, partial(on_wait, f"another process prepares the data in {directory}; waiting for it")):
                _prepare(runs, arm, directory, on_event)
            made.append(directory)


@contextmanager
def only_one(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock beside a file or directory, after waiting for another process that holds it."""
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    told = False
    try:
        while not try_lock(fd):
            if not told:
                on_wait()
            told = True
            time.sleep(_POLL)
        yield
    finally:
        os.close(fd)


def _prepare(runs: RunSet, arm: Arm, directory: Path, on_event: Callable[[StageEvent], None]) -> None:
    source = arm.resolved.source
    assert source is not None
    resolved = load_recipe(source.path, [*source.overrides, f"run_dir={directory}"])
    recipe = resolved.recipe
    files = source_files(recipe, {})
    for stage in _STAGES:
        inputs = stage_inputs(stage, recipe, directory, files)
        if not stale_reason(stage, recipe, directory, inputs):
            continue
        for provider in _providers(runs, directory):
            if not stale_reason(stage, recipe, provider, inputs):
                link_tree(provider / stage.folder, directory / stage.folder)
                break
        else:
            run_stages(resolved, last=stage.name, on_event=_only_new(on_event), resume_command=f"{runs.command} {runs.path}")


def _only_new(on_event: Callable[[StageEvent], None]) -> Callable[[StageEvent], None]:
    return lambda event: None if event.kind == "skip" else on_event(event)


def _providers(runs: RunSet, directory: Path) -> Iterator[Path]:
    """Directories that may have a stage that was made from equal inputs."""
    yield from sorted(path for path in directory.parent.iterdir() if path.is_dir() and path != directory)
    own = load_recipe(runs.recipe, runs.overrides).recipe.run_dir
    yield Path(own or "")
    yield from dict.fromkeys(run.branch.run_dir for run in runs.runs if run.branch)


def link_data(runs: RunSet, run: Run) -> None:
    """Give a run the data of its arm, and the checkpoint that it continues."""
    source = runs.data_dir(run.arm)
    for stage in _STAGES:
        if read_stamp(run.directory / stage.folder) is None:
            link_tree(source / stage.folder, run.directory / stage.folder)
    branch, folder = run.branch, run.directory / "checkpoints"
    if branch and not listing.has_checkpoints(folder):
        link_tree(branch.checkpoint, folder / branch.checkpoint.name)


def shared_bytes(paths: Sequence[Path]) -> int:
    """Bytes on disk below these paths, each file once however many links it has."""
    seen: dict[tuple[int, int], int] = {}
    for top in paths:
        for folder, _, names in os.walk(top):
            for name in names:
                found = os.lstat(os.path.join(folder, name))
                seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())
