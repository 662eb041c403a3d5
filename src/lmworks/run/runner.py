"""Runs the stages of a recipe: skips stages that are done, resumes or repeats the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from lmworks.checkpoint import listing as saved
from lmworks.corpus.read.snapshot import Listing, changes
from lmworks.io import urls
from lmworks.io.files import explain_full_disk, read_json, write_json
from lmworks.pages.beside import page_kept_new
from lmworks.pages.run_page import write_page
from lmworks.plan.stages import BY_BYTES, StageData
from lmworks.recipe.changes import Change, as_tree, changed_keys, harmless, readers, require_allowed
from lmworks.recipe.load import Resolved, load_resolved
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run import time_budget
from lmworks.run.changed_order import keep_order, record
from lmworks.run.prediction import record_error, record_prediction
from lmworks.run.refusals import Before, require_possible
from lmworks.run.run_dir import (
    StaleReason,
    list_files,
    phase_names,
    read_stamp,
    recipe_values,
    require_own_folder,
    require_own_run_dir,
    seconds_by_stage,
    stage_inputs,
    stale_reason,
    write_stamp,
)
from lmworks.run.stages import STAGES, STAMP, Stage, StageContext, checked_stages, clear, stages_for
from lmworks.watch import run_end
from lmworks.watch.ledger import LEDGER, Ledger, RunLock
from lmworks.weights.frozen_tokenizer import require_same, weights_of

if TYPE_CHECKING:
    from lmworks.shards.order import KeptRanges
    from lmworks.train.calibrate import Speed

SOURCES = "sources.json"
_MEASURE = "measure"
_DATA = ("corpus", "tokenizer", "shards")


@dataclass(frozen=True)
class StageEvent:
    """Progress of the run for the terminal: a stage begins, is skipped because it is done, or ends; or a note about it.

    `printable` is shown with the event; for a stage that is repeated it says why, and which stages will follow.
    """

    stage: str
    kind: str  # begin | skip | end | note
    seconds: float = 0.0
    printable: RenderableType | None = None


def run_stages(
    resolved: Resolved, *, last: str | None = None, allow: Sequence[str] = (), on_event: Callable[[StageEvent], None], resume_command: str
) -> Path:
    """Bring the run directory up to date with the recipe, up to and including stage `last`; returns the directory.

    Raises `UserError` before the first stage if a later stage could not run, and if the recipe has changed since training began and the
    changed keys are not allowed by name. Raises `Interrupted` if training was asked to stop.
    """
    recipe = resolved.recipe
    assert recipe.run_dir
    run_dir, began = Path(recipe.run_dir), time.monotonic()
    stages_for(recipe, last)
    urls.load(run_dir)
    allow_other_data = any(_affects_tokens(recipe, name) for name in allow)
    context = StageContext(recipe, run_dir, resume_command, allow_other_data, resolved.path.parent)
    try:
        with _alerting(context) as context, _join_ranks(context) as context:
            if context.ranks is not None and not context.ranks.is_first:
                _run_other_rank(context)
            else:
                _run_first_rank(context, resolved, last, allow, on_event, began)
    except BaseException as error:
        run_end.remember(run_end.RunEnd.of_error(error))
        raise
    return run_dir


@contextmanager
def _alerting(context: StageContext) -> Iterator[StageContext]:
    """Send alerts from this process if it is the only one or the first rank. The end of launched ranks is reported by their launcher."""
    recipe, run_dir, rank = context.recipe, context.run_dir, os.environ.get("RANK")
    if not recipe.alerts.targets or rank not in (None, "0"):
        yield context
        return
    from lmworks.launch.launch_dir import LaunchDir
    from lmworks.watch.alerting import alerting
    from lmworks.watch.heartbeat import Heartbeat

    if rank is not None:
        with alerting(recipe, run_dir, owner=False, heartbeats=LaunchDir.of(run_dir).heartbeats):
            yield context
        return
    folder = run_dir.absolute() / "alerts"  # which names the heartbeats of this process; nothing is written there
    heartbeat = Heartbeat(folder, shares=False)
    try:
        with alerting(recipe, run_dir, owner=True, heartbeats=folder):
            yield replace(context, heartbeat=heartbeat)
    finally:
        heartbeat.end("left")


@contextmanager
def _record_end(run_dir: Path, last: str | None, alerts: bool) -> Iterator[None]:
    """Record in the ledger how the run ended. The launcher does it for the ranks that it has started, and is told the reason by one. Where
    all stages were done before, nothing is written, unless somebody has asked for alerts."""
    error: BaseException | None = None
    before = _size(run_dir / LEDGER)
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if "RANK" not in os.environ and (error is not None or alerts or _size(run_dir / LEDGER) != before):
            end = run_end.RunEnd.of_error(error) if error is not None else run_end.RunEnd.of_code(0)
            end.record(run_dir, last)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def _join_ranks(context: StageContext) -> Iterator[StageContext]:
    """Join the process group if this process was launched as a rank. (Otherwise torch is not imported, so data stages start quickly.)"""
    if "RANK" not in os.environ:
        yield context
        return
    from lmworks.launch.rank_context import rank_context

    with rank_context(context.recipe, context.run_dir) as (ranks, heartbeat):
        yield replace(context, ranks=ranks, heartbeat=heartbeat)


def _run_other_rank(context: StageContext) -> None:
    """Run on all ranks but the first: carry out the commands that the first rank sends."""
    assert context.ranks is not None
    stages = {stage.name: stage for stage in STAGES}
    while (command := context.ranks.receive_broadcast()) is not None:
        if isinstance(command, Recipe):
            context = replace(context, recipe=command)
        elif command == _MEASURE:
            time_budget.measure_speed(context.recipe, context.run_dir, context.ranks)
        else:
            stages[command].work(context)


def _run_first_rank(
    context: StageContext, resolved: Resolved, last: str | None, allow: Sequence[str], on_event: Callable[[StageEvent], None], began: float
) -> None:
    """Run on the first rank: carry out the recipe, and send commands to the other ranks for what all ranks do."""
    run_dir, ranks = context.run_dir, context.ranks
    together = False

    def speed_of(recipe: Recipe) -> Speed:
        nonlocal together
        if ranks is not None:
            ranks.broadcast(recipe)
            ranks.broadcast(_MEASURE)
        together = True
        speed = time_budget.measure_speed(recipe, run_dir, ranks)
        together = False
        return speed

    try:
        require_own_run_dir(run_dir, resolved.text)
        with ExitStack() as after, RunLock(run_dir), ExitStack() as stack:
            settled = time_budget.recorded_budget(resolved, run_dir)
            recipe = (settled or resolved).recipe
            time_budget.require_kept(recipe, run_dir, last)
            stages = stages_for(recipe, last)
            state = _detect_changes(run_dir, settled or resolved, allow, on_event)
            trains = any(stage.name == "pretrain" for stage in stages)  # the data stages do not check the model
            waiting = [stage for stage in stages if state.stale_reason(stage, recipe)]
            for stage in waiting:
                require_own_folder(run_dir, stage)
            if waiting:
                _look_ahead(context, recipe, state, checked_stages(recipe, last), settled is None, on_event)
            require_same(run_dir, weights_of(run_dir))
            _record_changes(run_dir, state)
            _record_layout(run_dir, recipe)
            stack.enter_context(_record_end(run_dir, last, bool(context.recipe.alerts.targets)))
            if waiting:
                after.enter_context(page_kept_new(run_dir))
            (settled or resolved).save(run_dir)
            if state.files != recorded_files(run_dir):
                write_json(run_dir / SOURCES, state.files)
            for stage in (one for one in stages if one.name in _DATA):  # these do not depend on the time budget
                _run_stage(context, stage, resolved.recipe, state, on_event)
            if any(stage.name == "shards" for stage in stages):
                _require_enough_text(run_dir, recipe)
            if not trains:
                return
            made_now = settled is None
            if settled is None:
                tuning = _tuning_data(context, recipe, state)
                settled, lines = time_budget.settle_budget(
                    resolved, run_dir, lambda: time.monotonic() - began, speed_of, ranks is None, tuning
                )
                settled.save(run_dir)
                for line in lines:
                    on_event(StageEvent("pretrain", "note", printable=line))
            if lost := time_budget.given_up(settled.recipe, run_dir):
                on_event(StageEvent("pretrain", "note", printable=lost))
            time_budget.require_kept(settled.recipe, run_dir, last)
            if ranks is not None and settled is not resolved:
                ranks.broadcast(settled.recipe)
            context = replace(context, recipe=settled.recipe)
            for stage in (one for one in stages_for(settled.recipe, last) if one.name not in _DATA):
                together = stage.all_ranks
                _run_stage(context, stage, settled.recipe, state, on_event)
                together = False
            if made_now and last is None:
                _record_times(run_dir, time.monotonic() - began)
    finally:
        if ranks is not None and not together:  # an error while all ranks work is raised on all of them
            ranks.broadcast(None)


def _look_ahead(
    context: StageContext, recipe: Recipe, state: _State, stages: Sequence[Stage], proportions: bool, on_event: Callable[[StageEvent], None]
) -> None:  # fmt: skip
    """Refuse what one of `stages` would refuse, from the first that has to run on, and say what may become short. `proportions` is that of
    `Before`."""
    reasons = {stage.name: state.stale_reason(stage, recipe) for stage in stages}
    names = list(reasons)
    first = next((number for number, name in enumerate(names) if reasons[name]), len(names))
    resuming = [stage.name for stage in stages if stage.resumes and not reasons[stage.name].changed and not reasons[stage.name].new]
    before = Before(recipe, context.run_dir, context.folder, resuming, proportions=proportions)
    require_possible(before, names[first:])
    state.data.update(before.data)
    for note in before.notes:
        on_event(StageEvent(names[first], "note", printable=Text(f"warning: {note}", "yellow")))


def _tuning_data(context: StageContext, recipe: Recipe, state: _State) -> StageData | None:
    """What was read of the data of tuning. With epochs it decides how long tuning takes, and is counted with the tokenizer of the run;
    otherwise the time decides, and the steps that were counted are those of no run."""
    if recipe.tune is None or "tune" not in state.data:
        return None
    if recipe.tune.epochs is None:
        return state.data.pop("tune")
    if state.data["tune"].counted == BY_BYTES:
        before = Before(recipe, context.run_dir, context.folder)
        before.read("tune")
        state.data.update(before.data)
    return state.data["tune"]


def _require_enough_text(run_dir: Path, recipe: Recipe) -> None:
    """Raise `UserError` before training if there are too few tokens for the budgets. A budget in time is fitted to the data instead."""
    from lmworks.shards.manifest import Manifest
    from lmworks.shards.order import Order

    if recipe.time is None and recipe.train.phases and not saved.has_checkpoints(run_dir / "checkpoints"):
        Order(recipe, Manifest.load(run_dir / "shards"))


@dataclass(frozen=True)
class _State:
    """State at the start: the run directory, the current `files` of the sources, the `changes` of the recipe since the last run, the ranges
    of text that are `kept` with them, and what was read of the `data` of the stages before the first one."""

    run_dir: Path
    files: Listing
    changes: list[Change] = field(default_factory=list)
    kept: KeptRanges | None = None
    data: dict[str, StageData] = field(default_factory=dict)

    def inputs(self, stage: Stage, recipe: Recipe) -> dict[str, str]:
        return stage_inputs(stage, recipe, self.run_dir, self.files)

    def stale_reason(self, stage: Stage, recipe: Recipe) -> StaleReason:
        return stale_reason(stage, recipe, self.run_dir, self.inputs(stage, recipe))


def _record_times(run_dir: Path, seconds: float) -> None:
    """Record planned and actual times in the ledger."""
    with Ledger(run_dir / LEDGER) as ledger:
        stages = {name: list(pair) for name, pair in time_budget.planned_and_actual_seconds(run_dir, seconds_by_stage(run_dir)).items()}
        ledger.write("time", seconds=round(seconds, 1), planned_and_actual=stages)


def _run_stage(context: StageContext, stage: Stage, recipe: Recipe, state: _State, on_event: Callable[[StageEvent], None]) -> None:
    folder = context.run_dir / stage.folder
    made_from = state.inputs(stage, recipe)
    reason = stale_reason(stage, recipe, context.run_dir, made_from)
    if not reason:
        on_event(StageEvent(stage.name, "skip"))
        return
    require_own_folder(context.run_dir, stage)
    if not stage.keeps and not (stage.resumes and not reason.changed and not reason.new):
        clear(folder)
    for name in () if stage.all_ranks else reason.lost:  # the trainer finds the newest complete checkpoint itself
        if name != f"{stage.folder}/{STAMP}":
            (context.run_dir / name).unlink(missing_ok=True)
    on_event(StageEvent(stage.name, "begin", printable=_describe_redo(context.run_dir, stage, recipe, reason, state)))
    write_stamp(folder, stage, made_from)
    _record_stage(context.run_dir, stage, "stage_began")
    predicted = stage.all_ranks and (stage.name != "pretrain" or recipe.trains_base)
    if predicted:
        record_prediction(recipe, context.run_dir, stage.name, state.data)
    began = time.monotonic()
    if stage.all_ranks and context.ranks is not None:
        context.ranks.broadcast(stage.name)
    with explain_full_disk(folder):
        result = stage.work(context)
    seconds = time.monotonic() - began
    if predicted:
        record_error(context.run_dir, stage.name, seconds)
    write_stamp(folder, stage, made_from, seconds)
    _record_stage(context.run_dir, stage, "stage_ended", seconds=round(seconds, 1))
    write_page(context.run_dir)
    on_event(StageEvent(stage.name, "end", seconds, result))


def _record_stage(run_dir: Path, stage: Stage, event: str, **fields: float) -> None:
    """Record the start or end of a stage in the ledger; the trainer records its own stages."""
    if not stage.all_ranks:
        with Ledger(run_dir / LEDGER) as ledger:
            ledger.write(event, name=stage.name, **fields)


def _describe_redo(run_dir: Path, stage: Stage, recipe: Recipe, reason: StaleReason, state: _State) -> Text | None:
    """Why a finished stage is repeated, and which stages were built on it; None if it was not finished."""
    text = reason.text(state.changes)
    if not text:
        return None
    changed, built = {stage.folder}, []
    for other in stages_for(recipe):
        if any(need.partition("/")[0] in changed for need in other.needs) and read_stamp(run_dir / other.folder) is not None:
            changed.add(other.folder)
            built.append(other.name)
    after = f"; stages built on it follow if its output changes: {', '.join(built)}" if built else ""
    if stage.name == "tokenizer" and saved.has_checkpoints(run_dir / "checkpoints"):
        text += "; tokenizer.json is kept because weights were trained with it"
    return Text(f"repeated because {text + after}", "yellow")


def recorded_files(run_dir: Path) -> Listing:
    """The files of the sources as the last run recorded them."""
    path = run_dir / SOURCES
    seen: Listing = read_json(path) if path.exists() else {}
    return seen


def _detect_changes(run_dir: Path, resolved: Resolved, allow: Sequence[str], on_event: Callable[[StageEvent], None]) -> _State:
    """Detect changes of the recipe and of the user's files, which count as changes of the recipe."""
    before = recorded_files(run_dir)
    now = list_files(resolved.recipe, before)
    found = list(changes(before, now))
    accepted, kept = _accept_changes(run_dir, resolved, allow, found)
    for change in found:
        on_event(StageEvent("corpus", "note", printable=f"the files of {change.path.split('.')[2]} have changed: {change.new}"))
    matter, derived = [change for change in accepted if not harmless(change)], _derived_keys(resolved)
    follows = [change for change in matter if set(change.keys) <= derived]
    if follows and len(follows) < len(matter) and saved.has_checkpoints(run_dir / "checkpoints"):
        keep = " ".join(f"--set {change.path}={change.old}" for change in follows)
        note = f"derived values that change with it: {', '.join(map(str, follows))}; to keep them: {keep}"
        on_event(StageEvent("pretrain", "note", printable=note))
    return _State(run_dir, now, accepted, kept)


def _accept_changes(
    run_dir: Path, resolved: Resolved, allow: Sequence[str], files: Sequence[Change]
) -> tuple[list[Change], KeptRanges | None]:  # fmt: skip
    """Differences between the recipe and that of the last run, and the ranges of text that are kept with them; changed `files` of a source
    count as a change of it.

    Once training has begun, a changed recipe is rejected unless each changed key is allowed by name, and always where steps that were
    trained would have had other text.
    """
    path = run_dir / "resolved.json"
    if not path.exists():
        return list(files), None
    before, recipe = load_resolved(path), resolved.recipe
    changed = [*(change for change in changed_keys(before, recipe) if change.path != "run_dir"), *files]
    if sorted(phase_names(before)) == sorted(phase_names(recipe)) and phase_names(before) != phase_names(recipe):
        changed.append(Change("train.phases", phase_names(before), phase_names(recipe)))
    if not saved.has_checkpoints(run_dir / "checkpoints"):
        return changed, None
    kept = keep_order(run_dir, before, recipe, {key for change in changed for key in change.keys})
    require_allowed(changed, allow, _derived_keys(resolved), before.trains_base)
    return changed, kept


def _record_changes(run_dir: Path, state: _State) -> None:
    """Record what has changed since training began in the ledger. This follows all checks: a change that is refused was not made."""
    if not state.changes or not saved.has_checkpoints(run_dir / "checkpoints"):
        return
    if state.kept is not None:
        record(run_dir, state.kept)
    with Ledger(run_dir / LEDGER) as ledger:
        ledger.write(
            "recipe_changed",
            allowed=[{"key": c.path, "old": c.old, "new": c.new} for c in state.changes if not harmless(c)],
            harmless=[{"key": c.path, "old": c.old, "new": c.new} for c in state.changes if harmless(c)],
        )


def _derived_keys(resolved: Resolved) -> set[str]:
    """Keys whose values are derived from other keys. `threads` is omitted: it is derived from the machine."""
    return {path for path, origin in resolved.origins.items() if origin.kind == "derived"} - {"threads"}


def _affects_tokens(recipe: Recipe, allowed: str) -> bool:
    """Whether an allowed key, or a key below it, is read by the corpus or shards stage. Then the token files may change too."""
    if allowed.partition(".")[0] not in Recipe.model_fields:
        return False
    below = [path for path in recipe_values(recipe) if path.startswith(f"{allowed}.")]
    return any({"corpus", "shards"} & set(readers(path)) for path in (allowed, *below))


def _record_layout(run_dir: Path, recipe: Recipe) -> None:
    """Record the mesh layout at the start of a run with several ranks, and each change of it, in the ledger."""
    path = run_dir / "resolved.json"
    before = load_resolved(path).layout if path.exists() else Layout()
    if recipe.layout != before:
        with Ledger(run_dir / LEDGER) as ledger:
            ledger.write("layout", **as_tree(recipe.layout))
