"""A run directory as training leaves it, without the training: resolved recipe, tokenizer, checkpoints with given weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from lmworks.checkpoint import Checkpoints
from lmworks.io.files import sha256_file, write_json
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.changes import as_tree
from lmworks.train.build import identity
from lmworks.weights.frozen_tokenizer import META
from tiny_run import Tiny


def save_run(tiny: Tiny, to: Path, *overrides: str) -> dict[str, Transformer]:
    """Write a run with base checkpoints of the steps 4 and 30 and a tuned one, of different random weights; returns them by name."""
    recipe = tiny.resolve(f"run_dir={to}", *overrides).recipe
    shutil.copytree(tiny.run_dir / "tokenizer", to / "tokenizer")
    write_json(to / "resolved.json", as_tree(recipe))
    meta = {META: sha256_file(to / "tokenizer" / "tokenizer.json")}
    models: dict[str, Transformer] = {}
    saves = (("4", "checkpoints", 4, "general"), ("base", "checkpoints", 30, "long"), ("tuned", "tune/checkpoints", 8, "tune"))
    for seed, (name, place, step, phase) in enumerate(saves):
        models[name] = model = initialize(Transformer(recipe.model), seed=seed).eval()
        if name != "4":
            model.set_rope(recipe.train.phases[1].rope.apply(recipe.model.rope))  # type: ignore[union-attr]
        with Checkpoints(to / place, recipe.checkpoints, identity(recipe), recipe=as_tree(recipe)) as checkpoints:
            checkpoints.save(step, {"model": dict(model.state_dict())}, {**meta, "phase": phase}, wait=True)
    return models
