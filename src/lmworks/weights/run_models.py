"""The models of a run: which it has, their final checkpoints, and their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lmworks.checkpoint import listing, manifest
from lmworks.errors import UserError
from lmworks.io.run_layout import BASE, MODEL_STAGES, ModelStage, final_checkpoint_of, last, of_model
from lmworks.model import Transformer
from lmworks.recipe.load import load_resolved
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.weights import Weights, model_of
from lmworks.ui import terminal
from lmworks.weights.adapters import load_trained
from lmworks.weights.frozen_tokenizer import META, require_same, require_same_file


def folder(run_dir: Path, model: str) -> Path:
    """The folder with the checkpoints of a model, by its name in `lmworks.io.run_layout`."""
    return run_dir / of_model(model).checkpoints


def stages_of(recipe: Recipe, before: ModelStage | None = None) -> list[ModelStage]:
    """The stages of a recipe that train weights: all, or those before a stage."""
    earlier = MODEL_STAGES[: MODEL_STAGES.index(before)] if before else MODEL_STAGES
    return [stage for stage in earlier if stage is BASE or getattr(recipe, stage.stage) is not None]


def final_model(run_dir: Path, recipe: Recipe | None = None) -> str:
    """The name of the model that a run ends with: that of its last stage which has checkpoints."""
    recipe = recipe or load_resolved(run_dir / "resolved.json")
    return last(stage for stage in stages_of(recipe) if listing.directories(run_dir / stage.checkpoints)).model


def final_checkpoint(run_dir: Path, model: str) -> Path:
    """The final checkpoint of a model. Raises `UserError` if there is none."""
    return _final(folder(run_dir, model))


def _final(place: Path) -> Path:
    """The final checkpoint of a stage: the newest good one; after early stopping the best one, which the meta of the newest names."""
    while True:
        path, refused = listing.newest_good(place)
        if path is None:
            reasons = "; ".join(f"{bad.name}: {reason}" for bad, reason in refused)
            raise UserError(f"{place} has no good checkpoint{' (' + reasons + ')' if reasons else ''}; train one with: lmworks run RECIPE")
        try:
            meta = listing.read_meta(path)["meta"]
            break
        except UserError:
            if path.exists():
                raise
    used = final_checkpoint_of(path, meta)
    if used == path:
        return path
    if (reason := manifest.problem(used) if used.is_dir() else "it is missing") is not None:
        text = f"{used}, the best checkpoint of a stage that ended early, cannot be used ({reason}); using the newest, {path.name}"
        terminal.console.print(text, style="yellow")
        return path
    return used


def _filled(model: Transformer, path: Path, averaged: bool) -> dict[str, Any] | None:
    """Load a checkpoint into the model and return its meta; None if an active run has pruned it meanwhile. Low-rank adapters are merged
    into the weights of their base."""
    parameters = {name: parameter.data for name, parameter in model.named_parameters()} if averaged else None
    try:
        return load_trained(path, dict(model.state_dict()), parameters, model.config)
    except (OSError, UserError):
        if path.exists():
            raise
        return None


def load_model(
    run_dir: Path, model: str | None = None, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Transformer:
    """Load the final weights of a model of the run, with the positions that they were trained with, in evaluation mode, averaged if the
    run has averages.

    `model` is its name, by default that of the last stage (`final_model`). `dtype` is that of the activations; `device` is the first GPU,
    else the CPU, if it is left out.
    Raises `UserError` if there is no good checkpoint, or if the run's tokenizer is not the one that the weights were trained with.
    """
    recipe = load_resolved(run_dir / "resolved.json")
    place = folder(run_dir, model or final_model(run_dir, recipe))
    path = _final(place)
    loaded = _empty(recipe.model, run_dir)
    while (meta := _filled(loaded, path, bool(recipe.optimizer.ema_decay))) is None:
        path = _final(place)
    require_same(run_dir, meta.get(META))
    loaded.configure(model_of(recipe, meta))
    return _placed(loaded, dtype, device)


def load_checkpoint(weights: Weights, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Transformer:
    """The model of one checkpoint, with the positions of the phase that it had reached; otherwise as `load_model`.

    Raises `UserError` if the checkpoint is damaged, or if the tokenizer found with it is not the one that it was trained with.
    """
    if (reason := manifest.problem(weights.path)) is not None:
        raise UserError(f"{weights.path} is damaged ({reason}); use another checkpoint of its run")
    model = _empty(weights.model, weights.path)
    if (meta := _filled(model, weights.path, weights.averaged)) is None:
        raise UserError(f"{weights.path} does not exist any more; the run has deleted it, use a newer one")
    require_same_file(weights.tokenizer, meta.get(META))
    return _placed(model, dtype, device)


def _empty(model: Model, where: Path) -> Transformer:
    """A model to load weights into. Raises `UserError` if the recipe at `where` leaves a size open, as that of a corpus alone does."""
    if (size := model.open_size) is not None:
        raise UserError(f"the recipe of {where} has no model.{size}, so it describes no model; use a run that has trained one")
    return Transformer(model)


def _placed(model: Transformer, dtype: torch.dtype, device: torch.device | None) -> Transformer:
    model = model.to(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    model.compute_dtype = dtype
    return model.eval()
