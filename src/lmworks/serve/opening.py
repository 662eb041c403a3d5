"""A trained model on the disk as an engine that answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lmworks.errors import UserError
from lmworks.serve.engine import Engine
from lmworks.serve.models import Closed, Models

if TYPE_CHECKING:
    from lmworks.model import Transformer


def open_run(run_dir: Path, base: bool = False) -> Engine:
    """The engine for a run: its tuned model, or its base model if asked or if it has no other, from the newest good checkpoint.

    Raises `UserError` if there is no such run, nothing trained in it, or a model and tokenizer that do not belong together.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "resolved.json").is_file():
        raise UserError(f"{run_dir} is not a run directory (it has no resolved.json); make one with: lmworks run RECIPE")
    from lmworks.checkpoint.listing import directories
    from lmworks.recipe.loading.load import load_resolved
    from lmworks.train.load import folder, load_model

    recipe = load_resolved(run_dir / "resolved.json")
    tuned = not base and bool(directories(folder(run_dir, "tuned")))
    model = load_model(run_dir, "tuned" if tuned else "base")
    return engine_for(model, run_dir / "tokenizer", f"{recipe.name}-base" if base else recipe.name, tuned)


def open_both(run_dir: Path, base: bool = False) -> Models:
    """The models of a run to be served: that of `open_run`, and the other of base and tuned, where there is one, at its first request."""
    from lmworks.checkpoint.listing import directories
    from lmworks.train.load import folder

    first = open_run(run_dir, base)
    if not all(directories(folder(run_dir, which)) for which in ("base", "tuned")):
        return Models(first)
    name = first.name.removesuffix("-base") if base else f"{first.name}-base"
    return Models(first, {name: Closed(first.context, base, lambda: open_run(run_dir, not base))})


def engine_for(model: Transformer, tokenizer_dir: Path, name: str, tuned: bool = True) -> Engine:
    """The engine for a model and the tokenizer in `tokenizer_dir`. Raises `UserError` if they do not belong together."""
    from lmworks.serve.vocabulary import Vocabulary
    from lmworks.tokenizer import load

    vocabulary = Vocabulary(load(tokenizer_dir))
    rows, context = model.config.vocab_size, model.config.max_position_embeddings
    assert rows and context  # a resolved recipe and an exported config have both
    if vocabulary.size > rows:
        what = f"the tokenizer in {tokenizer_dir} has {vocabulary.size} entries, but the model {rows}"
        raise UserError(f"{what}: one of them is not of this run; make the tokenizer again with: lmworks run RECIPE")
    return Engine(model, vocabulary, name, int(context), tuned=tuned)
