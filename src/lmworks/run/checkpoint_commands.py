"""Operations on the checkpoints of a run that is not active: rollback, optimizer reset, prune, average.

Each takes the run's lock and is recorded in its ledger.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmworks.checkpoint import listing
from lmworks.checkpoint import publish as names
from lmworks.checkpoint.state import refuse_damaged
from lmworks.errors import UserError
from lmworks.evaluate.protection import SEARCHED
from lmworks.io import urls
from lmworks.io.files import explain_os_errors, read_json, write_json
from lmworks.io.run_layout import BASE, final_checkpoint_of, of_model, up_to
from lmworks.recipe.changes import as_tree
from lmworks.recipe.schema.artifacts import Checkpoints as Options
from lmworks.run.run_dir import invalidate_stamp, read_stamp, require_run, write_stamp
from lmworks.run.stages import STAGES, STAMP
from lmworks.watch.batch_growth import growths, skip_of_rollback
from lmworks.watch.ledger import LEDGER, ROLLBACK, Ledger, RunLock, Skips, rollbacks
from lmworks.weights.run_models import folder

_SHARED = ("corpus", "tokenizer", "shards")  # shared by the run of an averaged model with the original run
_COPIED = ("recipe.yaml", "sources.json", urls.NAME)


def find(run_dir: Path, model: str, step: int | None = None) -> Path:
    """The checkpoint of a step, or the newest. Raises `UserError` with the existing steps if there is none."""
    require_run(run_dir)
    found = listing.directories(folder(run_dir, model))
    if not found:
        raise UserError(f"{folder(run_dir, model)} has no checkpoints")
    if step is None:
        return found[-1]
    path = next((one for one in found if listing.step_of(one) == step), None)
    if path is None:
        steps = ", ".join(str(listing.step_of(one)) for one in found[-8:])
        raise UserError(f"{folder(run_dir, model)} has no checkpoint of step {step}; the newest are {steps}")
    return path


def require_own_weights(path: Path) -> None:
    """Raise `UserError` if a checkpoint has no tensors: that of a run without pretraining refers to the weights of `start_from`."""
    if (about := listing.reference_of(path)) is not None:
        raise UserError(
            f"{path} has no tensors of its own: its weights are those of start_from, {about['path']}; name a model that the run has "
            "trained, such as --model tuned"
        )


def rollback(run_dir: Path, model: str, to_step: int, skip: tuple[int, int] | None) -> dict[str, Any]:
    """Make the next run resume from `to_step`; returns what was done, as recorded in the ledger.

    Later checkpoints are renamed to `step-00000200.rolled-back-1`. The data of steps [skip[0], skip[1]) are skipped from then on, with all
    since the checkpoint if a growth of the batch is forgotten, which gives the steps other data. Stages
    built on the model count as not done. The metrics of the undone steps are cut when the run resumes.
    """
    path, phases = find(run_dir, model, to_step), require_run(run_dir).train.phases
    with RunLock(run_dir), Ledger(run_dir / LEDGER) as ledger:
        refuse_damaged(path)
        found = listing.directories(folder(run_dir, model))
        later = [one for one in found if listing.step_of(one) > to_step]
        step = listing.step_of(found[-1])
        if not later and skip is None:
            newest = f"step {to_step} is the newest checkpoint, from which the run resumes anyway"
            raise UserError(f"{newest}; give an earlier step or --skip-steps")
        if skip is not None and not to_step <= skip[0] < skip[1]:
            raise UserError(f"--skip-steps: {skip[0]}:{skip[1]} is not a range of steps from step {to_step} on")
        if model == BASE.model:
            lines = ledger.read()
            skip = skip_of_rollback(phases, growths(lines), Skips(rollbacks(lines, BASE.stage)).windows, to_step, skip)
        # The ledger first: a checkpoint that it has rolled back is not resumed from, even if this process is killed before the rename.
        fields = {"stage": of_model(model).stage, "step": step, "to_step": to_step, "skip": skip and list(skip)}
        ledger.write(ROLLBACK, **fields)
        again = _mark_undone(run_dir, of_model(model).stage)
        for one in reversed(later):
            names.set_aside(one, "rolled-back")
        for one in listing.pending(path.parent):
            if listing.step_of(one) > to_step:  # a checkpoint that is still on the nodes' local disks must not come back
                listing.marker(one).unlink()
    return fields | {"set_aside": [one.name for one in later], "again": again}


def _mark_undone(run_dir: Path, name: str) -> list[str]:
    """Mark a stage as unfinished and the stages built on it as not done; returns which of the latter had been started."""
    undone, again = {stage.folder for stage in STAGES if stage.name == name}, []
    for stage in STAGES:
        stamp = run_dir / stage.folder / STAMP
        if stage.name == name and stamp.exists():
            write_json(stamp, read_json(stamp) | {"done": False})
        elif undone & {need.partition("/")[0] for need in stage.needs}:
            undone.add(stage.folder)
            if invalidate_stamp(run_dir / stage.folder, stage):
                again.append(stage.name)
    return again


def reset_optimizer(run_dir: Path, model: str, step: int | None) -> dict[str, Any]:
    """Replace a checkpoint, by default the newest, by one with zero optimizer state; the old one is kept under another name."""
    from lmworks.checkpoint import rewrite

    path = find(run_dir, model, step)
    with RunLock(run_dir), Ledger(run_dir / LEDGER) as ledger:
        refuse_damaged(path)
        require_own_weights(path)
        kept = rewrite.reset_optimizer(path)
        fields = {"stage": of_model(model).stage, "step": listing.step_of(path), "kept": str(kept)}
        ledger.write("optimizer_reset", **fields)
        if path != listing.directories(path.parent)[-1]:
            command = f"lmworks ckpt rollback {run_dir} {listing.step_of(path)}"
            return fields | {"note": f"training resumes from the newest checkpoint; to resume from this one: {command}"}
    return fields


def prune(run_dir: Path, model: str, options: Options, set_aside: bool, dry: bool) -> dict[str, Any]:
    """Delete the checkpoints that the options do not keep, nor the stage after this one needs, as the run itself would; with `set_aside`
    also damaged, rolled-back and replaced ones."""
    require_run(run_dir)
    stage, place = of_model(model).stage, folder(run_dir, model)
    with RunLock(run_dir), Ledger(run_dir / LEDGER) as ledger, explain_os_errors(place):
        newest, _ = listing.newest_good(place)
        if newest is None:
            raise UserError(f"{place} has no good checkpoint, so nothing is deleted")
        used = final_checkpoint_of(newest, listing.read_meta(newest)["meta"])
        steps = names.prune(place, options, listing.step_of(newest), _planned_tokens(ledger.read(), stage), {used}, dry=dry)
        aside = sorted(path for path in place.glob("step-*.*") if path.is_dir()) if set_aside else []
        for path in () if dry else aside:
            shutil.rmtree(path)
        for step in () if dry else steps:
            ledger.write("checkpoint_pruned", stage=stage, step=step)
    return {"steps": steps, "set_aside": [path.name for path in aside], "dry_run": dry}


def _planned_tokens(lines: Iterable[Mapping[str, Any]], stage: str) -> int:
    """The tokens of a stage as it last began or resumed: of these its run counts `checkpoints.keep_every` in percent. 0, by which all are
    kept, for a stage that this run has not trained: its checkpoints are the weights of `start_from`, an average, or copies."""
    key = {"start": "tokens", "resume": "planned_tokens"}
    planned = [line.get(key[line["event"]]) for line in lines if line["event"] in key and line.get("stage") == stage]
    return int(next((tokens for tokens in reversed(planned) if tokens is not None), 0))


def average(run_dir: Path, model: str, steps: Sequence[int], weights: Sequence[float], to: Path) -> Path:
    """Make a run directory `to` whose model is the weighted mean of checkpoints of `run_dir`; returns the new checkpoint.

    Corpus, tokenizer and shards are links to those of `run_dir`. The new run can be tuned, evaluated, exported and served, but not trained
    further, because an average has no optimizer state. Raises `UserError` if `to` exists.
    """
    from lmworks.checkpoint import rewrite

    recipe = require_run(run_dir)
    paths = [find(run_dir, model, step) for step in steps]
    if os.path.lexists(to):
        raise UserError(f"{to} exists already; choose another directory for the average")
    for path in paths:
        refuse_damaged(path)
    with RunLock(to), Ledger(to / LEDGER) as ledger:
        try:
            final = rewrite.average(paths, weights, folder(to, model))
            with explain_os_errors(to):
                _link_inputs(run_dir, to, model)
            ledger.write("average", of=[str(path) for path in paths], weights=list(weights), path=str(final))
            # Last, because this makes it a run directory.
            write_json(to / "resolved.json", as_tree(recipe.model_copy(update={"run_dir": str(to)})))
        except BaseException:
            shutil.rmtree(to, ignore_errors=True)
            raise
    return final


def _link_inputs(run_dir: Path, to: Path, model: str) -> None:
    """Provide what the stages after the averaged one read, and the stamp that marks that stage as done."""
    for name in _COPIED:
        if (run_dir / name).exists():
            shutil.copy2(run_dir / name, to / name)
    for name in _SHARED:
        if (run_dir / name).exists():
            (to / name).symlink_to((run_dir / name).resolve(), target_is_directory=True)
    done = [stage for stage in STAGES if stage.name == of_model(model).stage]
    for earlier in up_to(model)[:-1]:  # later models are compared with them
        if (run_dir / earlier.checkpoints).is_dir():
            shutil.copytree(run_dir / earlier.checkpoints, to / earlier.checkpoints)
    if model != BASE.model and (data := of_model(model).place(run_dir) / "data").exists():
        (of_model(model).place(to) / "data").symlink_to(data.resolve(), target_is_directory=True)
    for stage in done:
        record = read_stamp(run_dir / stage.folder)
        if record:
            write_stamp(to / stage.folder, stage, record["inputs"], record.get("seconds", 0.0))
        if (searched := run_dir / stage.folder / SEARCHED).exists():
            shutil.copy2(searched, to / stage.folder / SEARCHED)
