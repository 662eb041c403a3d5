"""Loads trained models from disk into engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmworks.errors import UserError
from lmworks.model_stages import BASE
from lmworks.serve.engine import Engine
from lmworks.serve.models import LazyModel, Models

if TYPE_CHECKING:
    from lmworks.model import Transformer


def load_engine(run_dir: Path, base: bool = False, threads: int | None = None) -> Engine:
    """Load the engine of a run from the newest good checkpoint: of the model that it ends with, or of its base model if `base` is set.
    `threads` of the CPU are those of PyTorch by default.

    Raises `UserError` if there is no such run, if nothing has been trained, or if model and tokenizer do not match.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "resolved.json").is_file():
        raise UserError(f"{run_dir} is not a run directory (it has no resolved.json); make one with: lmworks run RECIPE")
    from lmworks.recipe.loading.load import load_resolved
    from lmworks.train.load import final_model, load_model

    recipe = load_resolved(run_dir / "resolved.json")
    which = BASE.model if base else final_model(run_dir, recipe)
    name = f"{recipe.name}-base" if base else recipe.name
    return make_engine(load_model(run_dir, which), run_dir / "tokenizer", name, which != BASE.model, threads)


def load_models(run_dir: Path, base: bool = False) -> Models:
    """The models of a run to serve: that of `load_engine`, and the other one of the base model and the one that the run ends with, if it
    exists, which is loaded at its first request."""
    from lmworks.train.load import final_model

    first = load_engine(run_dir, base)
    if final_model(run_dir) == BASE.model:
        return Models(first)
    name = first.name.removesuffix("-base") if base else f"{first.name}-base"
    return Models(first, {name: LazyModel(first.context, base, lambda: load_engine(run_dir, not base, first.threads))})


def make_engine(model: Transformer, tokenizer_dir: Path, name: str, tuned: bool = True, threads: int | None = None) -> Engine:
    """Make an engine from a model and the tokenizer in `tokenizer_dir`. Raises `UserError` if they do not match."""
    from lmworks.serve.vocabulary import Vocabulary
    from lmworks.tokenizer import load

    vocabulary = Vocabulary(load(tokenizer_dir))
    rows, context = model.config.vocab_size, model.config.max_position_embeddings
    assert rows and context  # a resolved recipe and an exported config have both
    if vocabulary.size > rows:
        what = f"the tokenizer in {tokenizer_dir} has {vocabulary.size} entries, but the model has {rows}"
        raise UserError(f"{what}: one of them is not from this run; make the tokenizer again with: lmworks run RECIPE")
    return Engine(model, vocabulary, name, int(context), tuned=tuned, threads=threads or torch.get_num_threads())
