"""Runs a saved bad batch through a checkpoint again and reports loss and gradients. Nothing in the run is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmworks.checkpoint import checkpoints, listing
from lmworks.checkpoint.state import SINGLE_PROCESS
from lmworks.errors import UserError
from lmworks.io.run_layout import BASE, of_model
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.weights import model_of
from lmworks.run.checkpoint_commands import find
from lmworks.run.run_dir import require_run
from lmworks.shards.batch import IGNORE, Batch
from lmworks.train.build import build_model, identity, load_weights
from lmworks.train.curriculum import phase_settings
from lmworks.train.step import micro_batch_of, seed_dropout
from lmworks.train.step_inspector import FirstNonFinite
from lmworks.watch.batch_growth import timeline_of
from lmworks.watch.policy import load_bad_batch
from lmworks.weights.adapters import adapter_identity, adapters_of

_SHOWN = 5


def bad_batches(run_dir: Path, model_name: str) -> dict[int, Path]:
    """The saved bad batches of a stage, by step."""
    place = of_model(model_name).place(run_dir) / "bad_batches"
    found = {path.stem.removeprefix("step-"): path for path in sorted(place.glob("step-*.npz"))}
    return {int(step): path for step, path in found.items() if step.isdecimal()}


def replay(run_dir: Path, model_name: str, step: int | None, at: int | None) -> dict[str, Any]:
    """Forward and backward of the batch saved at `step` (by default the newest) with the checkpoint of step `at` (by default the newest
    from before that step), in one process. No weight is changed. Only for stages that train on the next-token loss.

    Returns step, checkpoint, loss and gradient norm of the whole batch, `first` (the first operator whose result was not finite, or
    None), the sequences with the highest loss and the parameters with the largest gradients. Raises `UserError`.
    """
    recipe = require_run(run_dir)
    require_next_token_loss(of_model(model_name).stage)
    kept = bad_batches(run_dir, model_name)
    if not kept:
        raise UserError(f"{run_dir} has no saved bad batch of {of_model(model_name).title.lower()}")
    step = max(kept) if step is None else step
    if step not in kept:
        raise UserError(f"no batch of step {step} was saved; there are batches of the steps {', '.join(map(str, kept))}")
    batch = load_bad(kept[step], step, recipe)
    alone, model, path = model_at(run_dir, recipe, model_name, step, at)
    loss, norm, first, gradients = forward_backward(model, alone, batch)
    model.eval()
    single = [batch.rows(number, number + 1) for number in range(len(batch.tokens))]
    rows = [(number, model.summed_cross_entropy(one) / max(one.valid_tokens, 1)) for number, one in enumerate(single)]
    worst = sorted(rows, key=lambda one: -one[1] if math.isfinite(one[1]) else -math.inf)[:_SHOWN]
    return {
        "step": step, "checkpoint": path.name, "loss": loss, "grad_norm": norm, "first": first,
        "sequences": [{"sequence": row, "loss": value} for row, value in worst], "gradients": gradients,
    }  # fmt: skip


def model_at(
    run_dir: Path, recipe: Recipe, model_name: str, step: int, at: int | None = None, precision: str | None = None
) -> tuple[Recipe, ParallelModel, Path]:
    """The model as it was when it trained `step`, in one process: with the weights of the checkpoint of step `at`, by default the newest
    from before that step, or the oldest. Returns the recipe for one process, the model in training mode, and the checkpoint.

    precision: of the activations; that of the recipe by default. Raises `UserError`.
    """
    path = find(run_dir, model_name, _before(run_dir, model_name, step) if at is None else at)
    train = recipe.train.model_copy(
        update={"deepspeed": None, "compile": False, **({} if precision is None else {"precision": precision})}
    )
    alone = recipe.model_copy(update={"layout": Layout(), "train": train})
    adapters, own = adapters_of(path), identity(recipe)
    model = build_model(alone, lora=adapters[0] if adapters else None)
    if adapters is not None:
        load_weights(adapters[1], model, own, SINGLE_PROCESS, bool(recipe.optimizer.ema_decay))
        own |= adapter_identity(*adapters)
    meta = checkpoints.load(path, {"model": model.state_dict()}, own)
    _as_in_step(model, run_dir, recipe, model_name, step, meta)
    return alone, model, path


def require_next_token_loss(stage: str) -> None:
    """Raise `UserError` if a stage has another objective than the next-token loss."""
    why = {
        "dpo": "its loss compares two answers with those of the model before it",
        "grpo": "its batches are answers that the model sampled, which are not kept",
    }
    if stage in why:
        raise UserError(f"the batches of {stage} cannot be computed again: {why[stage]}; those of pretraining and tuning can")


def load_bad(path: Path, step: int, recipe: Recipe) -> Batch:
    """Load the saved batch of a step. Raises `UserError` if it is damaged, or not valid for the vocabulary."""
    arrays = load_bad_batch(path)
    tokens, labels, starts = (arrays.get(name, np.zeros(0)) for name in ("tokens", "labels", "cu_seqlens"))
    whole = tokens.ndim == 2 and tokens.size > 0 and tokens.shape == labels.shape and starts.ndim == 1
    whole = whole and all(array.dtype == np.int32 for array in (tokens, labels, starts))
    if not whole or not _fits(tokens, labels, starts, int(recipe.model.vocab_size or 0)):
        raise UserError(f"{path} is damaged, or of another run: its tokens and documents do not fit together")
    return Batch(tokens, labels, starts, 0, step)


def _fits(tokens: np.ndarray, labels: np.ndarray, starts: np.ndarray, vocab_size: int) -> bool:
    known = tokens.min() >= 0 and tokens.max() < vocab_size and labels.min() >= IGNORE and labels.max() < vocab_size
    rows = np.arange(0, tokens.size, tokens.shape[1])  # each sequence begins with a new document
    ordered = len(starts) > 1 and starts[0] == 0 and starts[-1] == tokens.size and (np.diff(starts) >= 0).all()
    return bool(known and ordered and np.isin(rows, starts).all())


def _before(run_dir: Path, model_name: str, step: int) -> int:
    """The newest checkpoint at or before `step`, or the oldest."""
    steps = [listing.step_of(path) for path in listing.directories(find(run_dir, model_name).parent)]
    return max((one for one in steps if one <= step), default=min(steps))


def _as_in_step(
    model: ParallelModel, run_dir: Path, recipe: Recipe, model_name: str, step: int, meta: Mapping[str, Any]
) -> None:  # fmt: skip
    """Configure the model as it was at a step; `meta` is that of the checkpoint."""
    if model_name == BASE.model:
        timeline = timeline_of(recipe, run_dir)
        phase = phase_settings(recipe, timeline)[timeline.phase_of(step)]
        assert phase.model is not None
        model.configure(phase.model)
        phase.begin_step(model, step)
    else:
        model.configure(model_of(recipe, meta))
    model.train()
    seed_dropout(recipe.training_seed, step, 0, model.device)


def forward_backward(model: ParallelModel, recipe: Recipe, batch: Batch) -> tuple[float, float, str | None, list[dict[str, Any]]]:
    """Loss, gradient norm, the first operator with a non-finite result, and the largest gradients."""
    valid, length = max(batch.valid_tokens, 1), batch.tokens.shape[1]
    with FirstNonFinite(model.parts) as watched:
        sums = model.forward_backward(batch, len(batch.tokens), micro_batch_of(recipe, length), 1 / valid, valid / batch.tokens.size)
    norm = float(model.clip_gradients(0.0)[0])
    norms = {name: float(torch.linalg.vector_norm(p.grad.float())) for name, p in model.named_parameters() if p.grad is not None}
    largest = sorted(norms, key=lambda name: -norms[name] if math.isfinite(norms[name]) else -math.inf)[:_SHOWN]
    return float(sums.cross_entropy) / valid, norm, watched.found, [{"parameter": name, "grad_norm": norms[name]} for name in largest]
