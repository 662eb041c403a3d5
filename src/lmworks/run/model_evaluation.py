"""`lmworks evaluate MODEL`: scores of one model on benchmark sets. Of a model of a run it is known what its training text was searched
for and what its training took."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from lmworks.evaluate import protection
from lmworks.evaluate.evaluate import evaluate_model
from lmworks.evaluate.results_folder import Evaluated
from lmworks.evaluate.sets.scoring import training_flops
from lmworks.io.run_layout import BASE
from lmworks.recipe.hub import locate
from lmworks.recipe.load import load_resolved
from lmworks.recipe.schema.artifacts import RopeExtension
from lmworks.recipe.schema.evaluate import Benchmark
from lmworks.run.stages import search_records
from lmworks.weights.open import open_model
from lmworks.weights.run_models import stages_of


def evaluate(
    where: str, benchmarks: Sequence[Benchmark], most: int, device: torch.device | None = None, rope: RopeExtension | None = None
) -> Evaluated:  # fmt: skip
    """Open a model (`lmworks.weights.open`), whose context `rope` may extend, and score it. Raises `UserError`."""
    where = locate(where)
    opened = open_model(where, device, rope=rope)
    run_dir = run_of(where)
    if run_dir is None:
        return evaluate_model(opened, benchmarks, most)
    recipe = load_resolved(run_dir / "resolved.json")
    searched = search_records(run_dir, recipe, *(stage.stage for stage in (stages_of(recipe) if opened.chat else (BASE,))))
    doubt = partial(protection.doubt, searched=searched, recipe=recipe, corpus_dir=run_dir / "corpus")
    return evaluate_model(opened, benchmarks, most, flops=training_flops(recipe, opened.model.config), doubt=doubt)


def run_of(where: str) -> Path | None:
    """The run directory to which a model belongs: itself, RUN of RUN@..., or that of a checkpoint; None if there is none."""
    path = Path(where).expanduser()
    if not path.exists():
        path = Path(where.rpartition("@")[0]).expanduser()
    here = path.resolve()
    for folder in (here, *here.parents[:3]):
        if (folder / "resolved.json").is_file():
            return folder if folder == here or here.parent.name == "checkpoints" else None
    return None
