"""A trained model of a run, for everything that comes after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from lmworks import progress
from lmworks.checkpoint import checkpoints, listing, manifest
from lmworks.errors import UserError
from lmworks.model import Transformer
from lmworks.recipe.loading.load import load_resolved
from lmworks.recipe.loading.weights import Weights
from lmworks.recipe.schema.model import Rope
from lmworks.recipe.schema.recipe import Recipe
from lmworks.train.data.frozen_tokenizer import META, require_same, require_same_file
from lmworks.train.early_stopping import USED


def folder(run_dir: Path, which: Literal["base", "tuned"]) -> Path:
    """Where the checkpoints of the pretrained or the tuned model lie."""
    return run_dir / "checkpoints" if which == "base" else run_dir / "tune" / "checkpoints"


def final_rope(recipe: Recipe) -> Rope:
    """The positions after the last phase."""
    rope = recipe.model.rope
    for phase in recipe.train.phases:
        rope = phase.rope.apply(rope) if phase.rope else rope
    return rope


def final_mtp_weight(recipe: Recipe) -> float | None:
    """The weight of multi-token prediction in the last phase; None without it."""
    changes = [phase.mtp_loss_weight for phase in recipe.train.phases if phase.mtp_loss_weight is not None]
    return (changes or [recipe.model.mtp.loss_weight])[-1] if recipe.model.mtp else None


def final_base(run_dir: Path) -> Path:
    """The checkpoint of pretraining that is built on; `UserError` if there is none."""
    return _final(folder(run_dir, "base"))


def _final(place: Path) -> Path:
    """The checkpoint whose weights are those of a stage: the newest good one; after an early end the best, of which the newest tells."""
    path, refused = listing.newest_good(place)
    while path is None and any(not bad.exists() for bad, _ in refused):  # a run that goes on has pruned them meanwhile
        path, refused = listing.newest_good(place)
    if path is None:
        reasons = "; ".join(f"{bad.name}: {reason}" for bad, reason in refused)
        raise UserError(f"{place} has no good checkpoint{' (' + reasons + ')' if reasons else ''}; train one with: lmworks run RECIPE")
    used = path.with_name(listing.name_of(int(listing.read_meta(path)["meta"].get(USED, listing.step_of(path)))))
    if used == path:
        return path
    if (reason := manifest.problem(used) if used.is_dir() else "it is not there") is not None:
        told = f"{used}, the best checkpoint of a stage that ended early, cannot be used ({reason}): {path.name} is, the newest"
        progress.console.print(told, style="yellow")
        return path
    return used


def _filled(model: Transformer, path: Path, averaged: bool) -> dict[str, Any] | None:
    """Fill the model from a checkpoint and return what else is in it; None if a run that goes on has pruned it meanwhile."""
    state: dict[str, object] = {"model": dict(model.state_dict())}
    try:
        found = checkpoints.load(path, state, verified=True)
        if averaged:
            checkpoints.load(path, {"average": {name: parameter.data for name, parameter in model.named_parameters()}}, verified=True)
    except (OSError, UserError):
        if path.exists():
            raise
        return None
    return found


def load_model(
    run_dir: Path, which: Literal["base", "tuned"] = "tuned", dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Transformer:
    """A stage's model as it ended, in evaluation mode; the average of the weights if one was kept.

    `dtype` is that of the activations; `device` is the first GPU, else the CPU, if it is left out. `which` "tuned" falls back to the base
    model where the run has no tuned one.
    Raises `UserError` if there is no good checkpoint, and if the run's tokenizer is not the one that the weights were trained with.
    """
    recipe = load_resolved(run_dir / "resolved.json")
    place = folder(run_dir, which)
    if which == "tuned" and (recipe.tune is None or not listing.directories(place)):
        place = folder(run_dir, "base")
    path = _final(place)
    model = Transformer(recipe.model)
    model.set_rope(final_rope(recipe))
    while (meta := _filled(model, path, bool(recipe.optimizer.ema_decay))) is None:
        path = _final(place)
    require_same(run_dir, meta.get(META))
    return _placed(model, dtype, device)


def load_checkpoint(weights: Weights, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Transformer:
    """The model of one checkpoint, with the positions of the phase that it had reached; otherwise as `load_model`.

    Raises `UserError` if the checkpoint is damaged, or if the tokenizer found with it is not the one that it was trained with.
    """
    if (reason := manifest.problem(weights.path)) is not None:
        raise UserError(f"{weights.path} is damaged ({reason}); use another checkpoint of its run")
    model = Transformer(weights.model)
    if (meta := _filled(model, weights.path, weights.averaged)) is None:
        raise UserError(f"{weights.path} does not exist any more; the run has deleted it, use a newer one")
    require_same_file(weights.tokenizer, meta.get(META))
    return _placed(model, dtype, device)


def _placed(model: Transformer, dtype: torch.dtype, device: torch.device | None) -> Transformer:
    model = model.to(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    model.compute_dtype = dtype
    return model.eval()
