"""Walks the stages of a recipe: skips what is done, resumes what broke."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from lmworks import credentials
from lmworks.checkpoint import listing as saved
from lmworks.corpus.readers.snapshot import Listing, changes, listing
from lmworks.doctor.page import write_page
from lmworks.errors import UserError
from lmworks.files import explain_full_disk, read_json, write_json
from lmworks.interrupt import Interrupted
from lmworks.recipe.loading.load import Resolved, load_resolved
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tree.effects import readers
from lmworks.recipe.tree.fingerprint import Change, as_tree, changed_keys, harmless, require_allowed
from lmworks.run import budget
from lmworks.run.stages import STAGES, STAMP, Context, Stage, clear, stages_for
from lmworks.run.stale import Why, inputs, phases, remember, remembered, require_own, require_own_directory, values_of, why
from lmworks.train.data.frozen_tokenizer import require_same, weights_of
from lmworks.watch.ledger import Ledger
from lmworks.watch.lock import RunLock

if TYPE_CHECKING:
    from lmworks.train.calibrate import Speed

SOURCES = "sources.json"
_MEASURE = "measure"
_DATA = ("corpus", "tokenizer", "shards")


@dataclass(frozen=True)
class Told:
    """What the walk tells the terminal: a stage begins, was done before, or has ended; or a note about it. With something to print: of one
    that begins again, why, and what will follow.
    """

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
    run_dir, began = Path(recipe.run_dir), time.monotonic()
    stages_for(recipe, last)
    credentials.load(run_dir)
    other_data = any(_reaches_tokens(recipe, name) for name in allow)
    with _joined(Context(recipe, run_dir, resume_command, other_data, resolved.path.parent)) as context:
        if context.ranks is not None and not context.ranks.is_first:
            _follow(context)
        else:
            _lead(context, resolved, last, allow, tell, began)
    return run_dir


@contextmanager
def _joined(context: Context) -> Iterator[Context]:
    """This process as one of the ranks, if it was launched as one. (What makes data alone does not wait for torch.)"""
    if "RANK" not in os.environ:
        yield context
        return
    from lmworks.launch.rank_context import rank_context

    with rank_context(context.recipe, context.run_dir) as (ranks, heartbeat):
        yield replace(context, ranks=ranks, heartbeat=heartbeat)


def _follow(context: Context) -> None:
    """Take part in what the first rank calls the others to."""
    assert context.ranks is not None
    stages = {stage.name: stage for stage in STAGES}
    while (told := context.ranks.receive_broadcast()) is not None:
        if isinstance(told, Recipe):
            context = replace(context, recipe=told)
        elif told == _MEASURE:
            budget.measure(context.recipe, context.run_dir, context.ranks)
        else:
            stages[told].work(context)


def _lead(
    context: Context, resolved: Resolved, last: str | None, allow: Sequence[str], tell: Callable[[Told], None], began: float
) -> None:
    """Do what the recipe asks, and call the other ranks to what all do."""
    run_dir, ranks = context.run_dir, context.ranks
    together = False

    def speed_of(recipe: Recipe) -> Speed:
        nonlocal together
        if ranks is not None:
            ranks.broadcast(recipe)
            ranks.broadcast(_MEASURE)
        together = True
        speed = budget.measure(recipe, run_dir, ranks)
        together = False
        return speed

    try:
        require_own_directory(run_dir, resolved.text)
        with RunLock(run_dir):
            settled = budget.kept(resolved, run_dir)
            recipe = (settled or resolved).recipe
            stages = stages_for(recipe, last)
            now = _look(run_dir, settled or resolved, allow, tell)
            trains = any(stage.name == "pretrain" for stage in stages)  # data alone is made without a word about the model
            waiting = [stage for stage in stages if now.why(stage, recipe)]
            for stage in stages_for(recipe) if trains and waiting else ():
                if stage.check:
                    stage.check(recipe)
            for stage in waiting:
                require_own(run_dir, stage)
            require_same(run_dir, weights_of(run_dir))
            _note_layout(run_dir, recipe)
            (settled or resolved).save(run_dir)
            if now.files != _seen(run_dir):
                write_json(run_dir / SOURCES, now.files)
            for stage in (one for one in stages if one.name in _DATA):  # which know nothing of what time becomes
                _bring(context, stage, resolved.recipe, now, tell)
            if any(stage.name == "shards" for stage in stages):
                _require_text(run_dir, recipe)
            if not trains:
                return
            made_now = settled is None
            if settled is None:
                settled, lines = budget.settle(resolved, run_dir, lambda: time.monotonic() - began, speed_of)
                settled.save(run_dir)
                for line in lines:
                    tell(Told("pretrain", "note", printable=line))
            if ranks is not None and settled is not resolved:
                ranks.broadcast(settled.recipe)
            context = replace(context, recipe=settled.recipe)
            for stage in (one for one in stages_for(settled.recipe, last) if one.name not in _DATA):
                together = stage.all_ranks
                _bring(context, stage, settled.recipe, now, tell)
                together = False
            if made_now and last is None:
                _compare_times(run_dir, time.monotonic() - began)
    finally:
        if ranks is not None and not together:  # what goes wrong while all are at work, all meet
            ranks.broadcast(None)


def _require_text(run_dir: Path, recipe: Recipe) -> None:
    """Raise `UserError` if the text is too little for the budgets, before anything is trained; those within a time are made to fit."""
    from lmworks.shards.format.manifest import Manifest
    from lmworks.shards.order.order import Order

    if recipe.time is None and recipe.train.phases and not saved.begun(run_dir / "checkpoints"):
        Order(recipe, Manifest.load(run_dir / "shards"))


@dataclass(frozen=True)
class _Now:
    """What lies in the run directory `run_dir`, what the sources' `files` are, and which `changes` of the recipe brought us here."""

    run_dir: Path
    files: Listing
    changes: list[Change] = field(default_factory=list)

    def inputs(self, stage: Stage, recipe: Recipe) -> dict[str, str]:
        return inputs(stage, recipe, self.run_dir, self.files)

    def why(self, stage: Stage, recipe: Recipe) -> Why:
        return why(stage, recipe, self.run_dir, self.inputs(stage, recipe))


def seconds_by_stage(run_dir: Path) -> dict[str, float | None]:
    """What the last try of each stage took, where it has ended."""
    paths = {stage.name: run_dir / stage.folder / STAMP for stage in STAGES}
    return {name: read_json(path).get("seconds") if path.exists() else None for name, path in paths.items()}


def _compare_times(run_dir: Path, seconds: float) -> None:
    """Write down what was planned beside what it took."""
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        stages = {name: list(pair) for name, pair in budget.compared(run_dir, seconds_by_stage(run_dir)).items()}
        ledger.write("time", seconds=round(seconds, 1), planned_and_actual=stages)


def _bring(context: Context, stage: Stage, recipe: Recipe, now: _Now, tell: Callable[[Told], None]) -> None:
    folder = context.run_dir / stage.folder
    made_from = now.inputs(stage, recipe)
    reason = why(stage, recipe, context.run_dir, made_from)
    if not reason:
        tell(Told(stage.name, "skip"))
        return
    require_own(context.run_dir, stage)
    if not stage.keeps and not (stage.resumes and not reason.changed and not reason.new):
        clear(folder)
    for name in () if stage.all_ranks else reason.lost:  # whoever trains looks for the newest whole checkpoint itself
        if name != f"{stage.folder}/{STAMP}":
            (context.run_dir / name).unlink(missing_ok=True)
    tell(Told(stage.name, "begin", printable=_again(context.run_dir, stage, recipe, reason, now)))
    remember(folder, stage, made_from)
    _note_stage(context.run_dir, stage, "stage_began")
    began = time.monotonic()
    if stage.all_ranks and context.ranks is not None:
        context.ranks.broadcast(stage.name)
    try:
        with explain_full_disk(folder):
            result = stage.work(context)
    except Interrupted:
        write_page(context.run_dir)
        raise
    seconds = time.monotonic() - began
    remember(folder, stage, made_from, seconds)
    _note_stage(context.run_dir, stage, "stage_ended", seconds=round(seconds, 1))
    write_page(context.run_dir)
    tell(Told(stage.name, "end", seconds, result))


def _note_stage(run_dir: Path, stage: Stage, event: str, **fields: float) -> None:
    """Write down when a stage was at work; the trainer does so for its own."""
    if not stage.all_ranks:
        with Ledger(run_dir / "ledger.jsonl") as ledger:
            ledger.write(event, name=stage.name, **fields)


def _again(run_dir: Path, stage: Stage, recipe: Recipe, reason: Why, now: _Now) -> Text | None:
    """Why a stage that was done is done again, and what was built on it."""
    text = reason.text(now.changes)
    if not text:
        return None
    changed, built = {stage.folder}, []
    for other in stages_for(recipe):
        if any(need.partition("/")[0] in changed for need in other.needs) and remembered(run_dir / other.folder) is not None:
            changed.add(other.folder)
            built.append(other.name)
    after = f"; what was built on it follows where it comes out different: {', '.join(built)}" if built else ""
    if stage.name == "tokenizer" and saved.begun(run_dir / "checkpoints"):
        text += "; tokenizer.json stays, since weights were trained with it"
    return Text(f"again, since {text + after}", "yellow")


def _seen(run_dir: Path) -> Listing:
    """The files of the sources as they were when the corpus was last looked after."""
    path = run_dir / SOURCES
    seen: Listing = read_json(path) if path.exists() else {}
    return seen


def _look(run_dir: Path, resolved: Resolved, allow: Sequence[str], tell: Callable[[Told], None]) -> _Now:
    """What the sources' files are now, and how the recipe has changed. Changed files are noticed as changes of the recipe are."""
    before = _seen(run_dir)
    now = listing(resolved.recipe, before)
    found = list(changes(before, now))
    accepted = _accept_changes(run_dir, resolved, allow, found)
    for change in found:
        tell(Told("corpus", "note", printable=f"the files of source {change.path.split('.')[2]} have changed: {change.new}"))
    matter, derived = [change for change in accepted if not harmless(change)], _derived(resolved)
    follows = [change for change in matter if set(change.keys) <= derived]
    if follows and len(follows) < len(matter) and saved.begun(run_dir / "checkpoints"):
        keep = " ".join(f"--set {change.path}={change.old}" for change in follows)
        tell(Told("pretrain", "note", printable=f"follows from what changed: {', '.join(map(str, follows))}; to keep it: {keep}"))
    return _Now(run_dir, now, accepted)


def _accept_changes(run_dir: Path, resolved: Resolved, allow: Sequence[str], files: Sequence[Change]) -> list[Change]:
    """How the recipe differs from that of the last walk; changed `files` of a source count as a change of it.

    Once training has begun, a changed recipe is refused unless each changed key is allowed by name, and what was allowed is written down.
    """
    path = run_dir / "resolved.json"
    if not path.exists():
        return list(files)
    before, recipe = load_resolved(path), resolved.recipe
    changed = [*(change for change in changed_keys(before, recipe) if change.path != "run_dir"), *files]
    if sorted(phases(before)) == sorted(phases(recipe)) and phases(before) != phases(recipe):
        changed.append(Change("train.phases", phases(before), phases(recipe)))
    if not saved.begun(run_dir / "checkpoints"):
        return changed
    accepted = require_allowed(changed, allow, _derived(resolved))
    if changed:
        with Ledger(run_dir / "ledger.jsonl") as ledger:
            ledger.write(
                "recipe_changed",
                allowed=[{"key": c.path, "old": c.old, "new": c.new} for c in accepted],
                harmless=[{"key": c.path, "old": c.old, "new": c.new} for c in changed if harmless(c)],
            )
    return changed


def _derived(resolved: Resolved) -> set[str]:
    """The keys whose values follow from others of the recipe. That of `threads` follows from the machine."""
    return {path for path, origin in resolved.origins.items() if origin.kind == "derived"} - {"threads"}


def _reaches_tokens(recipe: Recipe, allowed: str) -> bool:
    """Whether a key that may change, or one below it, is read by those who make the token files: then these may be other ones, too."""
    if allowed.partition(".")[0] not in Recipe.model_fields:
        return False
    below = [path for path in values_of(recipe) if path.startswith(f"{allowed}.")]
    return any({"corpus", "shards"} & set(readers(path)) for path in (allowed, *below))


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
