"""What a person does to the checkpoints of a run that rests: go back, reset, prune, average. Under the run's lock, and in its ledger."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lmworks import credentials
from lmworks.checkpoint import listing
from lmworks.checkpoint import publish as names
from lmworks.checkpoint.loading import refuse_damaged
from lmworks.corpus.contamination.record import RECORD
from lmworks.errors import UserError
from lmworks.files import explain_os_errors, read_json, write_json
from lmworks.recipe.schema.checkpoints import Checkpoints as Options
from lmworks.recipe.tree.fingerprint import as_tree
from lmworks.run.stages import STAGES, STAMP
from lmworks.run.stale import forget, remember, remembered
from lmworks.run.walk import require_run
from lmworks.shards.order.timeline import Timeline
from lmworks.train.load import folder
from lmworks.watch.ledger import Ledger
from lmworks.watch.lock import RunLock
from lmworks.watch.skips import EVENT

Which = Literal["base", "tuned"]
_STAGE = {"base": "pretrain", "tuned": "tune"}
_SHARED = ("corpus", "tokenizer", "shards")  # what an averaged model's run reads from the run that it came from
_COPIED = ("recipe.yaml", "sources.json", credentials.NAME)


def find(run_dir: Path, which: Which, step: int | None = None) -> Path:
    """The checkpoint of a step, or the newest; `UserError` naming those that there are."""
    require_run(run_dir)
    found = listing.directories(folder(run_dir, which))
    if not found:
        raise UserError(f"{folder(run_dir, which)} has no checkpoints")
    if step is None:
        return found[-1]
    path = next((one for one in found if listing.step_of(one) == step), None)
    if path is None:
        steps = ", ".join(str(listing.step_of(one)) for one in found[-8:])
        raise UserError(f"{folder(run_dir, which)} has no checkpoint of step {step}; the newest are {steps}")
    return path


def rollback(run_dir: Path, which: Which, to_step: int, skip: tuple[int, int] | None) -> dict[str, Any]:
    """Let the next run go on from `to_step`; returns what was done, as the ledger has it.

    Later checkpoints are renamed to `step-00000200.rolled-back-1`. Steps [skip[0], skip[1]) are left out from then on. Stages that were
    built on the model count as not done. The metrics of the steps that are taken back are cut when the run goes on.
    """
    path = find(run_dir, which, to_step)
    with RunLock(run_dir), Ledger(run_dir / "ledger.jsonl") as ledger:
        refuse_damaged(path)
        found = listing.directories(folder(run_dir, which))
        later = [one for one in found if listing.step_of(one) > to_step]
        step = listing.step_of(found[-1])
        if not later and skip is None:
            raise UserError(f"step {to_step} is the newest checkpoint, where the run goes on anyway; give an earlier step or --skip-steps")
        if skip is not None and not to_step <= skip[0] < skip[1]:
            raise UserError(f"--skip-steps: the steps {skip[0]}:{skip[1]} are not a window from step {to_step} on")
        # The ledger first: a checkpoint that it takes back is not resumed from, even if we are killed before it is renamed.
        fields = {"stage": _STAGE[which], "step": step, "to_step": to_step, "skip": skip and list(skip)}
        ledger.write(EVENT, **fields)
        again = _undo(run_dir, _STAGE[which])
        for one in reversed(later):
            names.set_aside(one, "rolled-back")
        for one in listing.announced(path.parent):
            if listing.step_of(one) > to_step:  # what is still on the machines' own disks must not come back
                listing.marker(one).unlink()
    return fields | {"set_aside": [one.name for one in later], "again": again}


def _undo(run_dir: Path, name: str) -> list[str]:
    """Mark a stage as begun and those built on it as not begun; returns the names of the latter that had been begun."""
    undone, again = {stage.folder for stage in STAGES if stage.name == name}, []
    for stage in STAGES:
        stamp = run_dir / stage.folder / STAMP
        if stage.name == name and stamp.exists():
            write_json(stamp, read_json(stamp) | {"done": False})
        elif undone & {need.partition("/")[0] for need in stage.needs}:
            undone.add(stage.folder)
            if forget(run_dir / stage.folder, stage):
                again.append(stage.name)
    return again


def reset_optimizer(run_dir: Path, which: Which, step: int | None) -> dict[str, Any]:
    """Replace a checkpoint, by default the newest, by one with the optimizer's state at zero; the old one is kept beside it."""
    from lmworks.checkpoint import rewrite

    path = find(run_dir, which, step)
    with RunLock(run_dir), Ledger(run_dir / "ledger.jsonl") as ledger:
        refuse_damaged(path)
        kept = rewrite.reset_optimizer(path)
        fields = {"stage": _STAGE[which], "step": listing.step_of(path), "kept": str(kept)}
        ledger.write("optimizer_reset", **fields)
        if path != listing.directories(path.parent)[-1]:
            command = f"lmworks ckpt rollback {run_dir} {listing.step_of(path)}"
            return fields | {"note": f"training goes on from the newest checkpoint; to go on from this one: {command}"}
    return fields


def prune(run_dir: Path, which: Which, options: Options, set_aside: bool, dry: bool) -> dict[str, Any]:
    """Remove what the options do not keep, and with `set_aside` also what was renamed aside (damaged, rolled back, before a reset)."""
    recipe = require_run(run_dir)
    timeline = Timeline(recipe.train.phases)
    tokens = timeline.tokens_before(timeline.steps) if which == "base" or recipe.tune is None else int(recipe.tune.tokens)
    place = folder(run_dir, which)
    with RunLock(run_dir), Ledger(run_dir / "ledger.jsonl") as ledger, explain_os_errors(place):
        newest, _ = listing.newest_good(place)
        if newest is None:
            raise UserError(f"{place} has no good checkpoint, so nothing is removed")
        steps = names.prune(place, options, listing.step_of(newest), tokens, dry=dry)
        aside = sorted(path for path in place.glob("step-*.*") if path.is_dir()) if set_aside else []
        for path in () if dry else aside:
            shutil.rmtree(path)
        for step in () if dry else steps:
            ledger.write("checkpoint_pruned", step=step)
    return {"steps": steps, "set_aside": [path.name for path in aside], "dry_run": dry}


def average(run_dir: Path, which: Which, steps: Sequence[int], weights: Sequence[float], to: Path) -> Path:
    """Make a run directory `to` whose model is the weighted mean of checkpoints of `run_dir`; returns the new checkpoint.

    Corpus, tokenizer and shards are links to those of `run_dir`. It can be tuned, evaluated, exported, served and talked to, but not be
    trained further, since an average has no optimizer state. `UserError` if `to` exists.
    """
    from lmworks.checkpoint import rewrite

    recipe = require_run(run_dir)
    paths = [find(run_dir, which, step) for step in steps]
    if os.path.lexists(to):
        raise UserError(f"{to} exists already; choose another directory for the average")
    for path in paths:
        refuse_damaged(path)
    with RunLock(to), Ledger(to / "ledger.jsonl") as ledger:
        try:
            final = rewrite.average(paths, weights, folder(to, which))
            with explain_os_errors(to):
                _furnish(run_dir, to, which)
            ledger.write("average", of=[str(path) for path in paths], weights=list(weights), path=str(final))
            # Last, since this makes it a run directory.
            write_json(to / "resolved.json", as_tree(recipe.model_copy(update={"run_dir": str(to)})))
        except BaseException:
            shutil.rmtree(to, ignore_errors=True)
            raise
    return final


def _furnish(run_dir: Path, to: Path, which: Which) -> None:
    """What the stages after the averaged one read, with the stamp that says that it is done."""
    for name in _COPIED:
        if (run_dir / name).exists():
            shutil.copy2(run_dir / name, to / name)
    for name in _SHARED:
        if (run_dir / name).exists():
            (to / name).symlink_to((run_dir / name).resolve(), target_is_directory=True)
    done = [stage for stage in STAGES if stage.name == _STAGE[which]]
    if which == "tuned":  # the tuned model was built on the base model, which comes along for what compares the two
        shutil.copytree(folder(run_dir, "base"), folder(to, "base"))
        if (run_dir / "tune" / "data").exists():
            (to / "tune" / "data").symlink_to((run_dir / "tune" / "data").resolve(), target_is_directory=True)
    for stage in done:
        record = remembered(run_dir / stage.folder)
        if record:
            remember(to / stage.folder, stage, record["inputs"], record.get("seconds", 0.0))
        if (searched := run_dir / stage.folder / RECORD).exists():
            shutil.copy2(searched, to / stage.folder / RECORD)
