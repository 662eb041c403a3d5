"""Walks the stages of a recipe: skips what is done, resumes what broke."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from lmworks import __version__
from lmworks.corpus.engine.listing import Listing, changes, listing
from lmworks.doctor.page import write_page
from lmworks.errors import UserError
from lmworks.files import read_json, sha256_file, write_json
from lmworks.interrupt import Interrupted
from lmworks.recipe.after import Layout
from lmworks.recipe.fingerprint import Change, as_tree, changed_keys, fingerprint, harmless, require_allowed
from lmworks.recipe.load import Resolved, load_resolved
from lmworks.recipe.paths import flat
from lmworks.recipe.recipe import Recipe
from lmworks.run.stages import STAGES, Context, Stage, clear, stages_for
from lmworks.watch.ledger import Ledger
from lmworks.watch.lock import RunLock

STAMP = "stage.json"
SOURCES = "sources.json"
_DATA = ("corpus", "tokenizer", "shards")  # --allow of any of these lets a started run go on with other token files


@dataclass(frozen=True)
class Told:
    """What the walk tells the terminal: a stage begins, was done before, or has ended with something to print; or a note about it."""

    stage: str
    what: str  # begin | skip | end | note
    seconds: float = 0.0
    printable: RenderableType | None = None


def walk(
    resolved: Resolved, *, last: str | None = None, allow: Sequence[str] = (), tell: Callable[[Told], None], resume_command: str
) -> Path:
    """Bring the run directory up to date with the recipe, up to and with stage `last`; returns the directory.

    Raises `UserError`: at once for what a later stage could not do, and when the recipe has changed since training began in a way
    that is not allowed by name. Raises `Interrupted` when training was asked to stop.
    """
    recipe = resolved.recipe
    assert recipe.run_dir
    run_dir = Path(recipe.run_dir)
    stages = stages_for(recipe, last)
    other_data = any(name.split(".")[0] in _DATA for name in allow)
    with _joined(Context(recipe, run_dir, resume_command, other_data, resolved.path.parent)) as context:
        if context.ranks is not None and not context.ranks.is_first:
            _follow(context)
        else:
            _lead(context, stages, resolved, allow, tell)
    return run_dir


@contextmanager
def _joined(context: Context) -> Iterator[Context]:
    """This process as one of the ranks, if it was launched as one. (What makes data alone does not wait for torch.)"""
    if "RANK" not in os.environ:
        yield context
        return
    from lmworks.launch.world import world

    with world(context.recipe, context.run_dir) as (ranks, heartbeat):
        yield replace(context, ranks=ranks, heartbeat=heartbeat)


def _follow(context: Context) -> None:
    """Take part in what the first rank calls the others to."""
    assert context.ranks is not None
    stages = {stage.name: stage for stage in STAGES}
    while (name := context.ranks.hear()) is not None:
        stages[name].work(context)


def _lead(context: Context, stages: Sequence[Stage], resolved: Resolved, allow: Sequence[str], tell: Callable[[Told], None]) -> None:
    """Do what the recipe asks, and call the other ranks to what all do."""
    recipe, run_dir = context.recipe, context.run_dir
    together = False
    try:
        with RunLock(run_dir):
            files = _look_at_sources(run_dir, recipe, allow, tell)
            stamps = stamps_of(recipe, run_dir, files)
            trains = any(stage.name == "pretrain" for stage in stages)  # data alone is made without a word about the model
            if trains and not all(is_done(run_dir, stage, stamps[stage.name]) for stage in stages):
                for stage in stages_for(recipe):
                    if stage.check:
                        stage.check(recipe)
            _note_layout(run_dir, recipe)
            resolved.save(run_dir)
            if files != _seen(run_dir):
                write_json(run_dir / SOURCES, files)
            for stage in stages:
                together = stage.all_ranks
                _bring(context, stage, stamps_of(recipe, run_dir, files)[stage.name], tell)
                together = False
    finally:
        if context.ranks is not None and not together:  # what goes wrong while all are at work, all meet
            context.ranks.tell(None)


def stamps_of(recipe: Recipe, run_dir: Path, files: Listing) -> dict[str, str]:
    """By stage, hex SHA-256 of all that it reads: values of the recipe, `files` of the sources, how what it builds on was made and what
    came out.
    """
    tree = flat(as_tree(recipe)) | {"train.phases": _phases(recipe)}
    stamps: dict[str, str] = {}
    for stage in stages_for(recipe):
        read = [path for path in sorted(tree) if _under(path, stage.reads) and not _passed_over(path)]
        values = {path: tree[path] for path in read} | ({"files": files} if stage.files and files else {})
        built_on = [need for need in STAGES if need.name in stage.needs and need.name in stamps]
        needs = {need.name: [stamps[need.name], _made(run_dir / need.folder)] for need in built_on}
        stamps[stage.name] = fingerprint({"values": values, "needs": needs})
    return stamps


def _made(folder: Path) -> str | None:
    """What the stage of a folder has said of the files it made; None before it has ended."""
    path = folder / STAMP
    made: str | None = read_json(path).get("made") if path.exists() else None
    return made


def _content(folder: Path, patterns: Sequence[str]) -> str:
    """Hex SHA-256 over names and contents of the files that match."""
    files = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return fingerprint({"files": {str(path.relative_to(folder)): sha256_file(path) for path in files}})


def _phases(recipe: Recipe) -> list[str]:
    """The order of the phases, which the paths of their values do not tell."""
    return [phase.name for phase in recipe.train.phases]


def _passed_over(path: str) -> bool:
    """What says how the work is done, not what comes out."""
    return path.startswith(("train.", "corpus.", "shards.")) and harmless(path)


def _under(path: str, nodes: Sequence[str]) -> bool:
    return any(path == node or path.startswith((node + ".", node + "[")) or fnmatchcase(path, node) for node in nodes)


def is_done(run_dir: Path, stage: Stage, expected: str) -> bool:
    """Whether the stage has ended under the expected stamp."""
    return _stamped(run_dir / stage.folder) == {"stamp": expected, "done": True}


def _stamped(folder: Path) -> dict[str, Any]:
    path = folder / STAMP
    return {key: read_json(path)[key] for key in ("stamp", "done")} if path.exists() else {}


def _bring(context: Context, stage: Stage, expected: str, tell: Callable[[Told], None]) -> None:
    folder = context.run_dir / stage.folder
    if is_done(context.run_dir, stage, expected):
        tell(Told(stage.name, "skip"))
        return
    if not stage.keeps and not (stage.resumes and _stamped(folder).get("stamp") == expected):
        clear(folder)
    tell(Told(stage.name, "begin"))
    record = {"stage": stage.name, "stamp": expected, "version": __version__}
    write_json(folder / STAMP, record | {"done": False})
    began = time.monotonic()
    if stage.all_ranks and context.ranks is not None:
        context.ranks.tell(stage.name)
    try:
        result = stage.work(context)
    except Interrupted:
        write_page(context.run_dir)
        raise
    seconds = time.monotonic() - began
    made = _content(folder, stage.makes) if stage.makes else None
    write_json(folder / STAMP, record | {"done": True, "seconds": round(seconds, 1), "made": made})
    write_page(context.run_dir)
    tell(Told(stage.name, "end", seconds, result))


def _seen(run_dir: Path) -> Listing:
    """The files of the sources as they were when the corpus was last looked after."""
    path = run_dir / SOURCES
    seen: Listing = read_json(path) if path.exists() else {}
    return seen


def _look_at_sources(run_dir: Path, recipe: Recipe, allow: Sequence[str], tell: Callable[[Told], None]) -> Listing:
    """What the sources' files are now. Changed ones are noticed as changes of the recipe are."""
    before = _seen(run_dir)
    now = listing(recipe, before)
    found = list(changes(before, now))
    _accept_changes(run_dir, recipe, allow, found)
    for change in found:
        tell(Told("corpus", "note", printable=f"the files of source {change.path.split('.')[2]} have changed: {change.new}"))
    return now


def _accept_changes(run_dir: Path, recipe: Recipe, allow: Sequence[str], files: Sequence[Change]) -> None:
    """Once training has begun, a changed recipe is refused unless each changed key is allowed by name; what was allowed is written down.

    Changed `files` of a source count as a change of it.
    """
    path = run_dir / "resolved.json"
    if not path.exists() or not any((run_dir / "checkpoints").glob("step-*")):
        return
    before = load_resolved(path)
    changed = [*(change for change in changed_keys(before, recipe) if change.path != "run_dir"), *files]
    if sorted(_phases(before)) == sorted(_phases(recipe)) and _phases(before) != _phases(recipe):
        changed.append(Change("train.phases", _phases(before), _phases(recipe)))
    accepted = require_allowed(changed, allow)
    if changed:
        with Ledger(run_dir / "ledger.jsonl") as ledger:
            ledger.write(
                "recipe_changed",
                allowed=[{"key": c.path, "old": c.old, "new": c.new} for c in accepted],
                harmless=[{"key": c.path, "old": c.old, "new": c.new} for c in changed if harmless(c.path)],
            )


def _note_layout(run_dir: Path, recipe: Recipe) -> None:
    """Write down on which layout a run begins, where it has several ranks, and every change of it."""
    path = run_dir / "resolved.json"
    before = load_resolved(path).layout if path.exists() else Layout()
    if recipe.layout != before:
        with Ledger(run_dir / "ledger.jsonl") as ledger:
            ledger.write("layout", **as_tree(recipe.layout))


def require_run(run_dir: Path) -> Recipe:
    """The resolved recipe of an existing run directory."""
    path = run_dir / "resolved.json"
    if not path.exists():
        raise UserError(f"{run_dir} is not a run directory (no resolved.json); make one with: lmworks run RECIPE")
    return load_resolved(path)
